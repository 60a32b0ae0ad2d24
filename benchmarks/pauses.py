"""How long training stands still for a checkpoint: full or increments, at once or behind.

    python -m benchmarks.pauses [--tables 8] [--rows 500000] [--width 32] [--steps 20] [--saves 5]

One rank trains the tables alone, by skewed ids, and saves after every so many steps to a temporary
folder, in turns with each kind of save. Reported are the seconds of the pause, the seconds until
the checkpoint is complete, the bytes that were written, and beside the pause the seconds of copying
the very rows that are saved once more, which no save behind the training can be quicker than.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.workload import quartiles
from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowWiseAdagrad
from rayrec.checkpoint import copy_touched, copy_whole, read_manifest
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import ShardingPlan, TablePlacement, table_wise
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.saver import Saver

KINDS = {
    "full": CheckpointConfig(),
    "increment": CheckpointConfig(incremental=True, full_every=1_000_000),
    "full, behind": CheckpointConfig(asynchronous=True),
    "increment, behind": CheckpointConfig(
        asynchronous=True, incremental=True, full_every=1_000_000
    ),
}


class Save(NamedTuple):
    """One checkpoint, in seconds and MB."""

    pause_s: float
    complete_s: float
    copy_s: float
    mb: float


class World:
    """Tables that train, and the content of a checkpoint beside them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tables = [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=args.rows,
                embedding_dim=args.width,
                feature_names=[f"f{i}"],
            )
            for i in range(args.tables)
        ]
        placements = {table.name: TablePlacement(table_wise(table, 0)) for table in self.tables}
        self.plan = ShardingPlan(world_size=1, tables=placements)
        module = torch.nn.Sequential(EmbeddingBagCollection(self.tables, device="meta"))
        self.model = DistributedModelParallel(
            module, plan=self.plan, sparse_optimizer=RowWiseAdagrad(lr=0.1), seed=0, track_rows=True
        )
        self.generator, self.step = torch.Generator().manual_seed(0), 0

    def train(self) -> None:
        """As many steps as lie between two checkpoints."""
        count = self.args.tables * self.args.batch
        for _ in range(self.args.steps):
            skewed = torch.rand(count, generator=self.generator, dtype=torch.float64) ** 3
            ids = (skewed * self.args.rows).long()
            keys = [table.feature_names[0] for table in self.tables]
            kjt = KeyedJaggedTensor(keys, ids, lengths=torch.ones(count, dtype=torch.int32))
            self.model(kjt).values().sum().backward()
        self.step += self.args.steps

    def copy_s(self, since: int | None) -> float:
        """Seconds of copying the rows touched since a mark, or all rows."""
        started = time.perf_counter()
        states = self.model.shard_states()
        assert self.model.touched is not None
        if since is None:
            _ = [copy_whole(state) for state in states]
        else:
            rows = self.model.touched.since(since)
            _ = [copy_touched(state, rows[state.shard]) for state in states]
        return time.perf_counter() - started

    def content(self) -> dict[str, Any]:
        """What `save_checkpoint` wants beside the shards."""
        return {"tables": self.tables, "plan": self.plan, "dense": {}, "step": self.step}


def measure(args: argparse.Namespace, kind: str, folder: str) -> list[Save]:
    """Some checkpoints of one kind, after a full one."""
    world, config = World(args), KINDS[kind]
    saver = Saver(config, world.model, rank=0, writers=1, keeps=True)
    assert world.model.touched is not None
    saves = []
    for i in range(args.saves + 1):
        mark = world.model.touched.mark()
        world.train()
        copy_s = world.copy_s(mark if config.incremental and i else None)
        where = f"{folder}/step-{world.step:08d}"
        started = time.perf_counter()
        saver.save(where, world.content(), lambda: None)
        pause_s = time.perf_counter() - started
        saver.thread.finish()
        complete_s = time.perf_counter() - started
        if i:
            mb = sum(read_manifest(where).paths().values()) / 1e6
            saves.append(Save(pause_s, complete_s, copy_s, mb))
    return saves


def main() -> None:
    """Save in every way, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--saves", type=int, default=5)
    args = parser.parse_args()
    lines = [
        "| save | pause, ms: median (min to max) | copying the same rows, ms | complete, ms | MB |",
        "|---|---|---|---|---|",
    ]
    found: dict[str, dict[str, list[float]]] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            saves = measure(args, kind, folder)
        by_part = {name: [getattr(s, name) for s in saves] for name in Save._fields}
        found[kind] = by_part
        pause, copy, whole = (
            quartiles([1e3 * value for value in by_part[name]])
            for name in ("pause_s", "copy_s", "complete_s")
        )
        lines.append(
            f"| {kind} | {pause['median']:.1f} ({pause['min']:.1f} to {pause['max']:.1f}) | "
            f"{copy['median']:.1f} | {whole['median']:.1f} | {max(by_part['mb']):.1f} |"
        )
    report.show("pauses", found, lines)


if __name__ == "__main__":
    main()
