"""One training step of 26 Criteo-like tables on local gloo ranks: rayrec against TorchRec and plain torch, interleaved in one run.

    python -m benchmarks.step [--ranks 2] [--rounds 9] [--steps 6] [--pooling 1 10] [--dim 64] [--batch 2048]
    python -m benchmarks.step --systems "rayrec table_wise" "rayrec pipeline" "torchrec table_wise" --malloc tuned

Every rank process holds all systems of a case; a round runs a few steps of each in turn, so that a drift of the machine hits all alike.
A step is timed on every rank and the slowest rank counts. The figure is the median over all steps of all rounds; the ratio is taken per
round. TorchRec takes part where it is importable (it asks for an environment of its own), table-wise: it refuses row-wise kinds on CPU.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing as mp
import os
import time
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.workload import Workload, bytes_floor, quartiles

DEFAULT = (
    "rayrec table_wise",
    "rayrec row_wise",
    "rayrec column_wise",
    "rayrec grid",
    "rayrec mixed",
    "rayrec pipeline",
    "rayrec fp16",
    "rayrec int8",
    "torchrec table_wise",
    "plain",
)


def rank_main(rank: int, port: Any, args: argparse.Namespace, results: Any) -> None:
    """One rank: build all systems, run the rounds, hand back seconds by system and round."""
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    from benchmarks.systems import available, build
    from rayrec.comm.process_group import connect_store, create_store, destroy_process_group, init_process_group
    from rayrec.train.memory import tune_malloc

    torch.set_num_threads(1)
    if args.malloc == "tuned":
        tune_malloc()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(args.ranks))
    if rank == 0:
        store = create_store("127.0.0.1")
        for _ in range(args.ranks - 1):
            port.put(store.port)
    else:
        store = connect_store("127.0.0.1", port.get())
    init_process_group(store, rank, args.ranks, timeout_s=300)
    measured = {}
    for pooling in args.pooling:
        work = Workload(dim=args.dim, pooling=pooling, batch=args.batch, cap=args.cap)
        batches = work.batches(rank, args.ranks, 8)
        steps = {name: build(name, work, rank, args.ranks, batches) for name in available(args.systems)}
        for step in steps.values():
            for i in range(args.warmup):
                step(i)
        seconds: dict[str, list[list[float]]] = {name: [] for name in steps}
        for round_ in range(args.rounds):
            for name, step in steps.items():
                dist.barrier()
                seconds[name].append([])
                for i in range(args.steps):
                    start = time.perf_counter()
                    step(args.warmup + round_ * args.steps + i)
                    seconds[name][-1].append(time.perf_counter() - start)
        measured[pooling] = seconds
        del steps, step
        gc.collect()
    destroy_process_group()
    results.put((rank, measured))


def main() -> None:
    """Start the ranks, gather their times, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="steps of each system per round")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--pooling", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048, help="rows of the global batch")
    parser.add_argument("--cap", type=int, default=1_000_000, help="rows of the largest table")
    parser.add_argument("--malloc", choices=("shipped", "tuned"), default="shipped", help="tuned: as in rayrec's ranks, for all systems")
    parser.add_argument("--systems", nargs="+", default=DEFAULT, help="'SYSTEM KIND'; the first is the reference")
    parser.add_argument("--label", help="name of the results files")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    port, queue = context.Queue(), context.Queue()
    processes = [context.Process(target=rank_main, args=(rank, port, args, queue)) for rank in range(args.ranks)]
    for process in processes:
        process.start()
    ranks = dict(queue.get(timeout=1500) for _ in processes)
    for process in processes:
        process.join(30)
    results: dict[str, Any] = {}
    first = next(iter(ranks[0][args.pooling[0]]))
    lines = [f"| pooling | system | ms per step, median (quartiles) | rows/s | time against {first} |", "|---|---|---|---|---|"]
    for pooling in args.pooling:
        slowest = {name: np.max([ranks[r][pooling][name] for r in ranks], axis=0) for name in ranks[0][pooling]}  # (rounds, steps)
        base = np.median(slowest[first], axis=1)
        for name, times in slowest.items():
            ms, ratio = quartiles(times.ravel() * 1e3), quartiles(np.median(times, axis=1) / base)
            results[f"pooling {pooling}, {name}"] = {"ms": ms, "ratio": ratio}
            lines.append(
                f"| {pooling} | {name} | {ms['median']:.2f} ({ms['p25']:.2f} to {ms['p75']:.2f}) | {args.batch / ms['median'] * 1e3:,.0f} "
                f"| {ratio['median']:.2f}x ({ratio['p25']:.2f} to {ratio['p75']:.2f}) |"
            )
        megabytes = bytes_floor(Workload(dim=args.dim, pooling=pooling, batch=args.batch, cap=args.cap)) / 1e6
        lines.append(f"| {pooling} | bytes that must move | {megabytes:.0f} MB | | |")
    print("\n".join(lines))
    print("written:", report.write("step", results, "\n".join(lines), args.label or f"step-malloc-{args.malloc}"))


if __name__ == "__main__":
    main()
