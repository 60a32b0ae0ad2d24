"""What publishing costs training: the same steps with publications and without, in turns.

    python -m benchmarks.publishing [--cap 200000] [--batch 2048] [--every 200] [--rounds 3]

Two models of one rank train a DLRM of 26 tables of Criteo's sizes, D 64, on Zipf ids: one keeps
what is touched and publishes a delta at the beginning of every period of so many steps, the other
does neither. The thread that packs and writes runs beside the steps of its period, and a period
ends when both are done. The cost is what the periods of the one take beyond those of the other.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.serving import DENSE, schema_of, zipf_ids
from benchmarks.workload import quartiles
from rayrec.data import Batch
from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.layout import ShardingPlan, TablePlacement, table_wise
from rayrec.machine.memory import tune_malloc
from rayrec.optim import RowWiseAdagrad
from rayrec.recipe import ModelRecipe
from rayrec.serve.chain.folder import ChainFolder
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import PublishConfig, TrainSpec
from rayrec.train.publisher import Publisher
from rayrec.train.run_state import LiveRun
from rayrec.train.step import train_step

TAKEN = ("plain", "publishing", "pause", "plain, of all cores", "publishing, of all cores")
BATCHES = 256  # different ones, which are taken in turns


class Side:
    """One of the two models, and its batches."""

    def __init__(self, args: argparse.Namespace, folder: Path | None) -> None:
        schema = schema_of(args.cap)
        recipe = ModelRecipe(
            model="dlrm", schema=schema.to_json(), dense_layers=(512, 256), over_layers=(512, 256)
        )
        with torch.device("meta"):
            tables = table_configs(recipe())
        placements = {table.name: TablePlacement(table_wise(table, 0)) for table in tables}
        plan = ShardingPlan(world_size=1, tables=placements)
        self.model = DistributedModelParallel(
            recipe(),
            plan=plan,
            sparse_optimizer=RowWiseAdagrad(lr=0.05),
            seed=0,
            track_rows=folder is not None,
        )
        self._dense = torch.optim.Adam([p for _, p in self.model.dense_parameters()], lr=1e-3)
        self._names = [f"f{i}" for i in range(len(tables))]
        self._ids = zipf_ids(schema, args.batch, BATCHES)
        self._rows, self._every, self.step = args.batch, args.every, 0
        self.publisher: Publisher | None = None
        if folder is not None:
            spec = TrainSpec(
                model=recipe,
                data=None,
                plan=plan,
                global_batch_size=args.batch,
                publish=PublishConfig(path=str(folder), every_n_steps=args.every),
                extras=recipe.to_extras(),
            )
            self._live = LiveRun(spec, torch.device("cpu"), lambda phase: None)
            self._live.model, self._live.tables = self.model, tables
            self.publisher = Publisher(self._live)

    def period(self) -> tuple[float, float, float]:
        """Seconds of a publication and the steps after it, of the pause in front of them, and of
        all cores in that time.
        """
        started, worked = time.perf_counter(), time.process_time()
        if self.publisher is not None:
            self._live.step = self.step
            self.publisher.after_window(0.0)
        pause = time.perf_counter() - started
        for _ in range(self._every):
            self._train()
        if self.publisher is not None:
            self.publisher.finish()
        return time.perf_counter() - started, pause, time.process_time() - worked

    def _train(self) -> None:
        ids = self._ids[self.step % BATCHES]
        # another part of the rows each time the batches come again
        lengths = torch.ones(len(ids), dtype=torch.int32)
        generator = torch.Generator().manual_seed(self.step)
        batch = Batch(
            dense_features=torch.randn(self._rows, DENSE, generator=generator),
            sparse_features=KeyedJaggedTensor(self._names, ids, lengths=lengths),
            labels=torch.rand(self._rows, generator=generator).round(),
            global_rows=self._rows,
        )
        train_step(self.model, self._dense, batch, 1)
        self.step += 1


def main() -> None:
    """Train both in turns, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--cap", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tune_malloc()
    with tempfile.TemporaryDirectory() as folder:
        plain, publishing = Side(args, None), Side(args, Path(folder))
        for side in (plain, publishing):
            side.period()  # the first publication is a base
        taken: dict[str, list[float]] = {name: [] for name in TAKEN}
        for _ in range(args.rounds):
            whole, _, worked = plain.period()
            taken["plain"].append(whole)
            taken["plain, of all cores"].append(worked)
            whole, pause, worked = publishing.period()
            taken["publishing"].append(whole)
            taken["pause"].append(pause)
            taken["publishing, of all cores"].append(worked)
        head = ChainFolder(folder).head()
        assert head is not None and publishing.publisher is not None
        rows = sum(table.rows for table in head.tables)
        mb = sum(file.bytes for file in head.files()) / 1e6
    show(args, taken, {"rows": rows, "mb": mb})


def _cost(taken: dict[str, list[float]], what: str) -> dict[str, float]:
    """What publishing takes beyond the same steps without, in percent, pair by pair."""
    pairs = zip(taken["publishing" + what], taken["plain" + what], strict=True)
    return quartiles([100 * (one / other - 1) for one, other in pairs])


def show(args: argparse.Namespace, taken: dict[str, list[float]], delta: dict[str, Any]) -> None:
    """Print and write what was measured."""
    load = os.getloadavg()[0]
    cost = _cost(taken, "")
    work = _cost(taken, ", of all cores")
    lines = ["| | seconds: median (min to max) |", "|---|---|"]
    for name, values in taken.items():
        own = quartiles(values)
        lines.append(f"| {name} | {own['median']:.2f} ({own['min']:.2f} to {own['max']:.2f}) |")
    lines += [
        "",
        f"Periods of {args.every} steps of {args.batch} rows, in turns. A delta has "
        f"{delta['rows']:,} rows and {delta['mb']:.0f} MB. Publishing once in a period costs "
        f"{cost['median']:.1f}% ({cost['min']:.1f} to {cost['max']:.1f}) of its time, and "
        f"{work['median']:.1f}% ({work['min']:.1f} to {work['max']:.1f}) of its work on all cores. "
        f"The load average was {load:.1f} at the end.",
    ]
    found = {
        "seconds": taken,
        "delta": delta,
        "cost in percent": cost,
        "work": work,
        "arguments": vars(args),
    }
    report.show("publishing", found, lines)


if __name__ == "__main__":
    main()
