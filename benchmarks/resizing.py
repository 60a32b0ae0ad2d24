"""How long training stands still when a run changes its number of ranks on purpose.

    python -m benchmarks.resizing [--tables 8] [--rows 1000000] [--width 64] [--most 4]
        [--changes 6] [--plan row_wise] [--write]

A DLRM trains on random ids through `Driver.fit`, with tables of 2 GB in all, and is told again and
again to go on with one rank less and with all of them. Reported are the seconds of each change,
from the wish until all ranks have begun again, and beside them the seconds that copying the tables
once takes in the memory of this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import report
from rayrec.data import DenseColumn, Feature, FeatureSchema, ParquetDataset
from rayrec.layout import EmbeddingBagConfig
from rayrec.recipe import ModelRecipe
from rayrec.train.callbacks import Callback
from rayrec.train.events import Resized

DATA_ROWS = 200_000
SETTLE_STEPS = 5  # from a change to the wish for the next one


class Wishes(Callback):
    """In the driver: wishes for one rank less and for all of them in turns, then for the end."""

    def __init__(self, changes: int, most: int) -> None:
        self._left = [most - (i + 1) % 2 for i in range(changes)]
        self._since, self._waits = 0, False
        self.driver: Any = None
        self.told: list[Resized] = []

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Wish for the next number some steps after the last change."""
        self._since = self._since or step
        if self._waits or step < self._since + SETTLE_STEPS:
            return
        if not self._left:
            self.driver.request_stop()
            return
        self.driver.resize(self._left.pop(0))
        self._waits = True

    def on_resize(self, resized: Resized) -> None:
        """The run goes on with another number of ranks."""
        self.told.append(resized)
        print(resized, f"in {resized.seconds:.2f} s", flush=True)
        self._waits, self._since = False, 0


def schema_of(args: argparse.Namespace) -> FeatureSchema:
    """Plain ids, one feature per table."""
    names = [f"f{i}" for i in range(args.tables)]
    return FeatureSchema(
        label="click",
        dense=(DenseColumn(column="age"),),
        features=tuple(Feature(name=name, column=name) for name in names),
        tables=tuple(
            EmbeddingBagConfig(
                num_embeddings=args.rows, embedding_dim=args.width, name=name, feature_names=[name]
            )
            for name in names
        ),
    )


def write_data(folder: Path, schema: FeatureSchema, rows: int) -> ParquetDataset:
    """Random rows."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "click": rng.integers(0, 2, DATA_ROWS).astype(np.float32),
        "age": rng.normal(size=DATA_ROWS).astype(np.float32),
    }
    columns |= {one.column: rng.integers(0, rows, DATA_ROWS) for one in schema.features}
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "part.parquet")
    return ParquetDataset(folder, schema)


def measure(folder: Path, args: argparse.Namespace) -> list[Resized]:
    """Train, with so many changes."""
    from rayrec.driver import Driver, OptimizerConfig, RunConfig, ScalingConfig
    from rayrec.driver.cluster import connected

    schema = schema_of(args)
    data = write_data(folder / "data", schema, args.rows)
    wishes = Wishes(args.changes, args.most)
    with connected(args.most):
        wishes.driver = Driver(
            ModelRecipe(
                model="dlrm", schema=schema.to_json(), dense_layers=(64,), over_layers=(64,)
            ),
            data,
            ScalingConfig(num_workers=(args.most - 1, args.most)),
            RunConfig(
                global_batch_size=args.batch,
                epochs=1000,
                sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.05),
                storage_path=str(folder),
                report_every_s=0.2,
                timeout_s=600.0,
                progress="plain" if args.verbose else "off",
                callbacks=(wishes,),
            ),
            plan=args.plan,
        )
        wishes.driver.fit()
    return wishes.told


def copy_seconds(megabytes: float) -> float:
    """Seconds of one thread to copy so much once, the median of three."""
    source = torch.ones(int(megabytes * 1e6), dtype=torch.uint8)
    target = torch.zeros_like(source)
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    """Run and report."""
    args = parse()
    megabytes = args.tables * args.rows * args.width * 4 / 1e6
    with tempfile.TemporaryDirectory(prefix="rayrec-resizing-") as name:
        told = measure(Path(name), args)
    copied_s = copy_seconds(megabytes)
    lines = ["| change | seconds: median (min to max) | times |", "|---|---|---|"]
    for down in (True, False):
        seconds = [one.seconds for one in told if (one.ranks < one.ranks_before) == down]
        before, after = (args.most, args.most - 1) if down else (args.most - 1, args.most)
        middle = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        lines.append(f"| {before} to {after} ranks | {middle} | {len(seconds)} |")
    lines += [
        "",
        f"Tables of {megabytes:,.0f} MB in all under the plan {args.plan!r}; one thread copies as "
        f"much in {copied_s:.2f} s. The load average was {os.getloadavg()[0]:.1f} at the end.",
    ]
    print("\n".join(lines))
    if args.write:
        found = {
            "changes": [(one.ranks_before, one.ranks, one.seconds) for one in told],
            "copy seconds": copied_s,
            "arguments": vars(args),
        }
        print("written:", report.write("resizing", found, "\n".join(lines)))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resizing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tables", type=int, default=8)
    add("--rows", type=int, default=1_000_000)
    add("--width", type=int, default=64)
    add("--most", type=int, default=4)
    add("--changes", type=int, default=6)
    add("--batch", type=int, default=1024)
    add("--plan", default="row_wise")
    add("--verbose", action="store_true")
    add("--write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
