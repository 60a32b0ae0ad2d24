"""Predicted against measured memory: what a rank holds after some steps of its tables, beside what the planner counts for it.

    python -m benchmarks.memory [--sets 12] [--ranks 2] [--write]

Every table set is trained by fresh CPU ranks, first under the planner's plan and then, by other ranks, under another. A rank's memory is
its proportional share, code left out (a page that two ranks map counts half for each), read before the model is built and after the steps,
beyond what it takes for a table of a few rows. Its heap gives nothing back in between, so that what it holds then is the most it ever
needed, with the holes that malloc left. The gradient of the output is all the dense model there is.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.predicted import MEMORY, TableSet, batches_of, make_plans, make_set, seeds_of
from benchmarks.ranks import join
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, Topology
from rayrec.planner import manual_plan
from rayrec.planner.estimate import estimate_ranks

STEPS, BATCH = 12, 2048


def share_bytes() -> int:
    """This process's proportional share of the memory it maps, code left out."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(words[1]) << 10 for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


def rank_main(rank: int, port: Any, num_ranks: int, tables: TableSet, plan: ShardingPlan, results: Any) -> None:
    """One rank: train some steps, tell what they took."""
    from rayrec.train.memory import tune_malloc

    tune_malloc()
    import torch
    import torch.distributed as dist

    from rayrec.comm.process_group import destroy_process_group
    from rayrec.distributed import DistributedModelParallel
    from rayrec.modules import EmbeddingBagCollection
    from rayrec.optim import RowWiseAdagrad

    join(rank, num_ranks, lambda found: [port.put(found) for _ in range(num_ranks - 1)], port.get)
    batches = batches_of(tables, rank, 4)
    (torch.ones(1, requires_grad=True) * 2).sum().backward()  # autograd's own memory is not the model's
    dist.barrier()
    before = share_bytes()
    collection = EmbeddingBagCollection(list(tables.tables), device=torch.device("meta"))
    model = DistributedModelParallel(collection, plan=plan, sparse_optimizer=RowWiseAdagrad(lr=0.01), seed=0)
    for step in range(STEPS):
        output = model(batches[step % len(batches)]).values()
        output.backward(torch.ones_like(output))
        del output
    dist.barrier()
    found = share_bytes() - before
    dist.barrier()
    del model
    destroy_process_group()
    results.put((rank, found))


def measure(context: Any, tables: TableSet, plan: ShardingPlan, num_ranks: int) -> list[int]:
    """Bytes by rank."""
    port, results = context.Queue(), context.Queue()
    processes = [context.Process(target=rank_main, args=(r, port, num_ranks, tables, plan, results)) for r in range(num_ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
    return [found[rank] for rank in range(num_ranks)]


def main() -> None:
    """Measure, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="seed of the first set")
    parser.add_argument("--sets", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rayrec.distributed", "rayrec.modules", "benchmarks.predicted"])
    topology = Topology.local(options.ranks, memory_bytes=MEMORY)
    tiny = TableSet((EmbeddingBagConfig(8, 4, "t", feature_names=["f"]),), (1,), 4)
    alone = round(median(measure(context, tiny, manual_plan(tiny.tables, "column_wise", topology), options.ranks)))
    print(f"Without tables: {alone / 1e6:.1f} MB.")
    lines = [
        "| set | plan | rank | weights and state MB | buffers MB | predicted MB | measured MB | predicted / measured |",
        "|---" * 8 + "|",
    ]
    ratios, results = [], []
    for seed in seeds_of(options):
        tables = replace(make_set(seed), batch_size=BATCH)
        for name, plan in list(make_plans(tables, seed, topology).items())[:2]:
            predicted = estimate_ranks(tables.request(topology), plan)
            for rank, (told, found) in enumerate(zip(predicted, measure(context, tables, plan, options.ranks), strict=True)):
                found -= alone
                ratio = told.memory_bytes / found
                ratios.append(ratio)
                held = told.weight_bytes + told.optimizer_bytes
                row = [held, told.buffer_bytes, told.memory_bytes, found]
                results.append({"set": seed, "plan": name, "rank": rank, "held": held, "buffers": told.buffer_bytes, "measured": found})
                what = f"{seed}: {len(tables.tables)} tables"
                lines.append(f"| {what} | {name} | {rank} | " + " | ".join(f"{v / 1e6:.1f}" for v in row) + f" | {ratio:.2f} |")
                print(lines[-1], flush=True)
    near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    lines.append(f"\nWithout tables a rank takes {alone / 1e6:.1f} MB, which is taken off. Batches of {BATCH} rows a rank.")
    lines.append(f"Within 15%: {near} of {len(ratios)}; median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}.")
    print("\n".join(lines[-2:]))
    if options.write:
        print("written:", report.write("memory", {"without_tables": alone, "ranks": results}, "\n".join(lines)))


if __name__ == "__main__":
    main()
