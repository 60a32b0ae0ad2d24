"""Kills at every moment of a run, over plans, spares and sync points: what `rayrec chaos` runs.

    python -m benchmarks.kills FOLDER [--kills 12] [--lock FILE]
    python -m benchmarks.chaos FOLDER/*.json

Each of sixteen cells is a call of `rayrec chaos` with so many faults, whose outcome is a file of
FOLDER. A cell whose file is there is not run again, so the same command goes on where it was cut
off. In ten of the cells Ray's control service is stopped as well. With --lock cells wait for the
lock of a file, and give it back after --turn seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rayrec.chaos.moments import MOMENTS

RANKS = 2
PLANS = ("table_wise", "row_wise", "mixed", "data_parallel")


class Cell(NamedTuple):
    """One call of `rayrec chaos`."""

    plan: str
    spares: bool
    sync_points: bool
    gcs: bool

    @property
    def name(self) -> str:
        """Of its file."""
        parts = ("spares", self.spares), ("points", self.sync_points), ("gcs", self.gcs)
        return "-".join([self.plan, *(word for word, has in parts if has)])


def cells() -> Iterator[Cell]:
    """All of them; the control service is stopped in five of each eight."""
    for number, (spares, points, plan) in enumerate(product((False, True), (False, True), PLANS)):
        yield Cell(plan, spares, points, number * 5 % 8 < 5)


def main() -> None:
    """Run the cells that have no file yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--lock", default=os.devnull)
    parser.add_argument("--turn", type=float, default=500.0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    prepare(args.folder / "data")
    with open(args.lock, "w") as lock:
        since = -args.turn
        for number, cell in enumerate(cells()):
            if (args.folder / f"{cell.name}.json").exists():
                continue
            if time.monotonic() > since + args.turn:
                fcntl.flock(lock, fcntl.LOCK_UN)
                fcntl.flock(lock, fcntl.LOCK_EX)
                since = time.monotonic()
            code = subprocess.run(command(args.folder, cell, args.kills, number)).returncode
            print(f"{cell.name}: code {code}", flush=True)


def prepare(data: Path) -> None:
    """Make the data, and the plan in which the tables have all kinds."""
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import write_synthetic
    from rayrec.layout import (
        ShardingPlan,
        TablePlacement,
        column_wise,
        data_parallel,
        row_wise,
        table_wise,
    )
    from rayrec.layout.schema import FeatureSchema

    if (data / "mixed").exists():
        return
    write_synthetic(data, SyntheticConfig(rows_train=200_000, rows_eval=40_000, seed=1))
    everyone = range(RANKS)
    makes = (
        lambda i, table: table_wise(table, i % RANKS),
        lambda i, table: row_wise(table, everyone),
        lambda i, table: column_wise(table, everyone),
        lambda i, table: data_parallel(table, everyone),
    )
    tables = FeatureSchema.load(data / "schema.json").tables
    placements = {
        table.name: TablePlacement(makes[number % len(makes)](number, table))
        for number, table in enumerate(tables)
    }
    ShardingPlan(world_size=RANKS, tables=placements).save(data / "mixed")


def command(folder: Path, cell: Cell, kills: int, seed: int) -> list[str]:
    """The call of a cell."""
    data = folder / "data"
    plan = str(data / "mixed") if cell.plan == "mixed" else cell.plan
    chaos = ["chaos", "--every", "3s", "--signals", "KILL", "--timeout", "300s"]
    chaos += ["--at", ",".join(MOMENTS), "--faults", str(kills), "--seed", str(seed)]
    chaos += ["--out", str(folder / f"{cell.name}.json")]
    chaos += ["--gcs"] if cell.gcs else []
    job = f"train --data {data} --ranks {RANKS} --plan {plan}"
    job += f" --checkpoint-dir {folder}/runs-{cell.name}"
    keys = ["run.steps=300", "run.global_batch_size=512", "run.heartbeat_timeout_s=10"]
    keys += ["run.checkpoint.every_n_steps=20", "run.checkpoint.num_to_keep=2"]
    keys += ["scaling.spares=1"] if cell.spares else []
    keys += ["run.failure.sync_every_n_steps=10"] if cell.sync_points else []
    job += "".join(f" --set {key}" for key in keys)
    start = [sys.executable, "-m", "rayrec.cli.main"]
    return [*start, *chaos, "--", *start, *job.split()]


if __name__ == "__main__":
    main()
