"""Predicted against measured memory: what a rank holds after some steps of its tables, beside what
the planner counts for it.

    python -m benchmarks.memory [--sets 12] [--ranks 2] [--write]

Every table set is trained by fresh CPU ranks, first under the planner's plan and then, by other
ranks, under another. Before them come three sets that are nearly all of one thing: weights, rows
under way, or ids. Their prediction must hold within bounds for the rank that took least of three
times, since malloc may leave holes in a heap and no formula knows where; else the exit code is 1. A
rank's memory is its proportional share, code left out (a page that two ranks map counts half for
each), read before the model is built and after the steps, beyond what it takes for a table of a few
rows. Its heap gives nothing back in between, so that what it holds then is the most it ever needed,
with the holes that malloc left. The gradient of the output is all the dense model there is.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.predicted import MEMORY, TableSet, batches_of, make_plans, make_set, seeds_of
from benchmarks.ranks import join
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, Topology
from rayrec.layout.estimates import RankEstimate
from rayrec.planner import manual_plan
from rayrec.planner.estimate import estimate_ranks

STEPS, BATCH = 12, 2048
LEAST, MOST = 0.75, 1.35  # predicted / measured of a set that is nearly all of one thing


def eight_tables(rows: int, dim: int, pooling: int, batch_size: int) -> TableSet:
    """Eight equal tables."""
    tables = tuple(
        EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"f{i}"]) for i in range(8)
    )
    return TableSet(tables, (pooling,) * 8, batch_size)


ONE_THING = {
    "weights": (eight_tables(60_000, 64, 2, 512), "table_wise"),
    "rows under way": (eight_tables(1000, 128, 1, 4096), "row_wise"),
    "ids": (eight_tables(1000, 16, 80, 2048), "column_wise"),
}


def share_bytes() -> int:
    """This process's proportional share of the memory it maps, code left out."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(words[1]) << 10 for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


def rank_main(
    rank: int, port: Any, num_ranks: int, tables: TableSet, plan: ShardingPlan, results: Any
) -> None:
    """One rank: train some steps, tell what they took."""
    from rayrec.machine.memory import tune_malloc

    tune_malloc()
    import torch
    import torch.distributed as dist

    from rayrec.comm.process_group import destroy_process_group
    from rayrec.distributed import DistributedModelParallel
    from rayrec.modules import EmbeddingBagCollection
    from rayrec.optim import RowWiseAdagrad

    join(rank, num_ranks, lambda found: [port.put(found) for _ in range(num_ranks - 1)], port.get)
    batches = batches_of(tables, rank, 4)
    # autograd's own memory is not the model's
    (torch.ones(1, requires_grad=True) * 2).sum().backward()
    dist.barrier()
    before = share_bytes()
    collection = EmbeddingBagCollection(list(tables.tables), device=torch.device("meta"))
    model = DistributedModelParallel(
        collection, plan=plan, sparse_optimizer=RowWiseAdagrad(lr=0.01), seed=0
    )
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
    processes = [
        context.Process(target=rank_main, args=(r, port, num_ranks, tables, plan, results))
        for r in range(num_ranks)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
    return [found[rank] for rank in range(num_ranks)]


class Case(NamedTuple):
    """A table set under a plan, and what its ranks took."""

    tables: TableSet
    plan_name: str
    predicted: tuple[RankEstimate, ...]
    measured: list[int]

    def ratios(self) -> list[float]:
        """Predicted / measured, by rank."""
        return [
            told.memory_bytes / found
            for told, found in zip(self.predicted, self.measured, strict=True)
        ]

    def lines(self, name: str) -> list[str]:
        """A line of the table for every rank."""
        lines = []
        for rank, (told, found, ratio) in enumerate(
            zip(self.predicted, self.measured, self.ratios(), strict=True)
        ):
            row = (
                told.weight_bytes + told.optimizer_bytes,
                told.buffer_bytes,
                told.memory_bytes,
                found,
            )
            numbers = " | ".join(f"{v / 1e6:.1f}" for v in row)
            lines.append(
                f"| {name}: {len(self.tables.tables)} tables | {self.plan_name} | {rank} | "
                f"{numbers} | {ratio:.2f} |"
            )
        return lines

    def results(self, name: str) -> list[dict[str, Any]]:
        """The same for the JSON file."""
        return [
            {
                "set": name,
                "plan": self.plan_name,
                "rank": rank,
                "held": told.weight_bytes + told.optimizer_bytes,
                "buffers": told.buffer_bytes,
                "measured": found,
            }
            for rank, (told, found) in enumerate(zip(self.predicted, self.measured, strict=True))
        ]


def main() -> int:
    """Measure, compare, print and write; returns the exit code."""
    parser = report.parser(__doc__)
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
    alone = round(
        median(
            measure(context, tiny, manual_plan(tiny.tables, "column_wise", topology), options.ranks)
        )
    )
    print(f"Without tables: {alone / 1e6:.1f} MB.")
    lines = [
        "| set | plan | rank | weights and state MB | buffers MB | predicted MB | measured MB | "
        "predicted / measured |",
        "|---" * 8 + "|",
    ]
    results: list[dict[str, Any]] = []

    def compare(
        name: str, tables: TableSet, plan_name: str, plan: ShardingPlan, rounds: int
    ) -> Case:
        """Measure a case some times, and note and print the least that each rank took."""
        predicted = tuple(estimate_ranks(tables.request(topology), plan))
        found = [measure(context, tables, plan, options.ranks) for _ in range(rounds)]
        measured = [min(of_rank) - alone for of_rank in zip(*found, strict=True)]
        case = Case(tables, plan_name, predicted, measured)
        lines.extend(case.lines(name))
        results.extend(case.results(name))
        print("\n".join(case.lines(name)), flush=True)
        return case

    outside = []
    for name, (tables, kind) in ONE_THING.items():
        case = compare(name, tables, kind, manual_plan(tables.tables, kind, topology), rounds=3)
        ratio = min(told.memory_bytes for told in case.predicted) / min(case.measured)
        if not LEAST < ratio < MOST:
            outside.append(f"{name} ({ratio:.2f})")
    ratios: list[float] = []
    for seed in seeds_of(options):
        tables = replace(make_set(seed), batch_size=BATCH)
        for plan_name, plan in list(make_plans(tables, seed, topology).items())[:2]:
            ratios += compare(str(seed), tables, plan_name, plan, rounds=1).ratios()
    near = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    spread = f"median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    lines.append(f"\nWithout tables a rank takes {alone / 1e6:.1f} MB, which is taken off.")
    lines.append(
        f"Numbered sets, {BATCH} rows a rank: within 15%: {near} of {len(ratios)}; {spread}."
    )
    lines.append(f"Sets of one thing outside of {LEAST} to {MOST}: {', '.join(outside) or 'none'}.")
    print("\n".join(lines[-3:]))
    if options.write:
        print(
            "written:",
            report.write("memory", {"without_tables": alone, "ranks": results}, "\n".join(lines)),
        )
    return int(bool(outside))


if __name__ == "__main__":
    sys.exit(main())
