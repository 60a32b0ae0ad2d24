"""A lookup kernel's forward, backward and update, by optimizer and kind of table, against FBGEMM's
fastest CPU path, in one process.

    python -m benchmarks.lookup [--pooling 1 10] [--dim 64] [--batch 2048] [--rounds 11] [--threads
    2]

The reference is float32 row-wise Adagrad on tables that one feature reads. Every case looks up the
same ids in as many tables of the same sizes with the kernel that `make_lookup` chooses; "odd width"
takes two columns off every table, "shared" lets two features read each table, "two widths" halves
the columns of every other table, "sequence" returns every row by itself. "bytes" is what an update
must read and write, against the reference: Adam keeps two more values per element. With --threads
every case is timed on so many threads, too, and compared with itself on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.workload import Workload, quartiles
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import GroupKey, LookupGroup, Slot, Use
from rayrec.layout import DataType, Shard, Storage
from rayrec.machine.memory import tune_malloc
from rayrec.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    SparseOptimizer,
)

REFERENCE = "row-wise Adagrad"
OPTIMIZERS: dict[str, SparseOptimizer] = {
    REFERENCE: RowWiseAdagrad(lr=0.02),
    "SGD": SGD(lr=0.02),
    "Adagrad": Adagrad(lr=0.02),
    "row-wise Adagrad, decay": RowWiseAdagrad(lr=0.02, weight_decay=1e-4),
    "Adam": Adam(lr=0.02),
    "partial row-wise Adam": PartialRowWiseAdam(lr=0.02),
    "LAMB": LAMB(lr=0.02),
    "LARS": LarsSGD(lr=0.02),
}
KINDS = (
    "fp16",
    "fp16 SGD",
    "bf16",
    "bf16 SGD",
    "odd width",
    "odd width SGD",
    "shared",
    "shared SGD",
    "shared Adam",
    "weighted",
    "two widths",
    "two widths Adam",
    "sequence",
    "sequence Adam",
)


def group_of(name: str, work: Workload) -> LookupGroup:
    """The tables of one case as a lookup group."""
    by_kind = {REFERENCE: REFERENCE, "SGD": "SGD", "Adam": "Adam"}
    optimizer = OPTIMIZERS[
        name if name in OPTIMIZERS else by_kind.get(name.rsplit(" ", 1)[-1], REFERENCE)
    ]
    sequence, shared = name.startswith("sequence"), name.startswith("shared")
    key = GroupKey(
        collection=0,
        carrier="sequence" if sequence else "pooled",
        data_type={"fp16": DataType.FP16, "bf16": DataType.BF16}.get(name[:4], DataType.FP32),
        weighted=name.startswith("weighted"),
        storage=Storage(),
        optimizer=optimizer,
        sequence=sequence,
        width=work.dim if sequence else 0,
    )
    shards, slots = [], []
    for i, rows in enumerate(work.rows):
        if shared and i % 2:
            shard = shards[-1]
        else:
            width = (
                work.dim // 2
                if name.startswith("two widths") and i % 2
                else work.dim - 2 * name.startswith("odd width")
            )
            shard = Shard(
                f"t{i}", range(max(rows, work.rows[i ^ 1]) if shared else rows), range(width), 0
            )
            shards.append(shard)
        slots.append(Slot(Use(i, 0, shard.table, f"f{i}", 0, len(shard.cols)), shard, 0, i))
    return LookupGroup(key, tuple(shards), tuple(slots))


def step_of(name: str, work: Workload, threads: int) -> Callable[[int], None]:
    """A step of one case: batch i forward, backward, update."""
    group = group_of(name, work)
    lookup = GroupLookup(group, torch.device("cpu"), Workers(threads))
    for state in lookup.shard_states():
        state.weight.uniform_(-0.1, 0.1)
    batches = []
    for ids, lengths in work.batches(0, 1, 8):
        # ids become rows of all shards one after the other, each a bag of its own
        if name.startswith("sequence"):
            first = (
                torch.tensor([0, *work.rows[:-1]])
                .cumsum(0)
                .repeat_interleave(work.batch * work.pooling)
            )
            batches.append(GroupIds(ids + first, torch.arange(ids.numel() + 1), None))
        else:
            offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.long().cumsum(0)))
            batches.append(
                GroupIds(
                    ids, offsets, torch.rand(ids.numel()) if name.startswith("weighted") else None
                )
            )
    width, rows = (
        (work.dim, batches[0].ids.numel())
        if name.startswith("sequence")
        else (group.width, work.batch)
    )
    grad = torch.randn(rows, width) * 0.01

    def step(i: int) -> None:
        lookup(batches[i % len(batches)]).backward(grad)

    return step


def row_values(optimizer: SparseOptimizer, dim: int) -> int:
    """Values of one row, weight and state."""
    return dim + sum(dim if per == "element" else 1 for per in optimizer.state_widths.values())


def main() -> None:
    """Time all cases in turns, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--pooling", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument(
        "--cap",
        type=int,
        default=100_000,
        help="rows of the largest table; all cases lie in memory at once",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--threads",
        type=int,
        nargs="*",
        default=[],
        help="time every case on so many threads, too, e.g. 2 4",
    )
    parser.add_argument("--cases", nargs="+", default=[*OPTIMIZERS, *KINDS])
    args = parser.parse_args()
    tune_malloc()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lines = [
        "| pooling | case | threads | ms per step, median (quartiles) | time against the reference "
        "| against one thread | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for pooling in args.pooling:
        work = Workload(dim=args.dim, pooling=pooling, batch=args.batch, cap=args.cap)
        names = [REFERENCE, *(name for name in args.cases if name != REFERENCE)]
        steps = {
            (name, threads): step_of(name, work, threads)
            for name in names
            for threads in (1, *args.threads)
        }
        seconds: dict[tuple[str, int], list[float]] = {case: [] for case in steps}
        for step in steps.values():
            step(0)
            step(1)
        for i in range(args.rounds):
            for case, step in steps.items():
                start = time.perf_counter()
                step(2 * i)
                step(2 * i + 1)
                seconds[case].append((time.perf_counter() - start) / 2)
        base = np.array(seconds[REFERENCE, 1])
        for (name, threads), times in seconds.items():
            ms, ratio = quartiles([1e3 * t for t in times]), quartiles(np.array(times) / base)
            alone = quartiles(np.array(times) / np.array(seconds[name, 1]))
            optimizer = group_of(name, work).key.optimizer
            more = row_values(optimizer, args.dim) / row_values(OPTIMIZERS[REFERENCE], args.dim)
            case = f"pooling {pooling}, {name}" + (f", {threads} threads" if threads > 1 else "")
            results[case] = {"ms": ms, "ratio": ratio, "against one thread": alone, "bytes": more}
            spread = f"{ms['median']:.2f} ({ms['p25']:.2f} to {ms['p75']:.2f})"
            spread = f"({alone['p25']:.2f} to {alone['p75']:.2f})"
            ratios = f"{ratio['median']:.2f}x | {alone['median']:.2f}x {spread}"
            lines.append(f"| {pooling} | {name} | {threads} | {spread} | {ratios} | {more:.1f}x |")
    lines.append(
        f"\n{work.tables} tables, {args.dim} columns, {args.batch} bags each, "
        f"{args.rounds} interleaved rounds."
    )
    report.show("lookup", results, lines)


if __name__ == "__main__":
    main()
