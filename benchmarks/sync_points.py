"""What being able to undo costs a step: sync points every so many steps, against none.

    python -m benchmarks.sync_points [--steps 400] [--every 200] [--rows 200000] [--dense]

One rank trains three equal models in turns, step by step on the same batches: a plain one, one with
stamps of touched rows, as incremental checkpoints need them, and one with sync points, whose memory
a keeper process holds. CPU time of the process is added up per model, sync points included, since
other work on the machine disturbs it less than the clock. Ids are skewed as those of clicks, or
uniform.
"""

from __future__ import annotations

import argparse
import os
import time
import uuid
from typing import Any

import torch

from benchmarks import report
from rayrec.comm.kept_memory import KeptMemory, end_keepers
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, TablePlacement, table_wise
from rayrec.models import DLRM, DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import RowWiseAdagrad
from rayrec.shards.undo import Point
from rayrec.sparse import KeyedJaggedTensor


class Batch:
    """Rows of a click model."""

    def __init__(self, args: argparse.Namespace, generator: torch.Generator) -> None:
        draws = torch.rand(args.tables, args.batch, generator=generator)
        if args.skewed:
            draws = draws**3
        ids = (draws * args.rows).long().clamp_(max=args.rows - 1)
        keys = [f"f{i}" for i in range(args.tables)]
        lengths = torch.ones(args.tables * args.batch, dtype=torch.int32)
        self.sparse_features = KeyedJaggedTensor(keys, ids.view(-1), None, lengths)
        self.dense_features = torch.rand(args.batch, 13, generator=generator)
        self.labels = torch.randint(0, 2, (args.batch,), generator=generator).float()
        self.rows = self.global_rows = args.batch


class Contender:
    """One model, and the CPU seconds that its steps took."""

    def __init__(self, args: argparse.Namespace, **options: Any) -> None:
        tables = []
        placements = {}
        for i in range(args.tables):
            table = EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=args.rows,
                embedding_dim=args.width,
                feature_names=[f"f{i}"],
            )
            tables.append(table)
            placements[table.name] = TablePlacement(table_wise(table, 0))
        collection = EmbeddingBagCollection(tables, device="meta")
        module: torch.nn.Module = collection
        if args.dense:
            width = args.width
            module = DLRMTrain(DLRM(collection, 13, [512, 256, width], [512, 256, 1]))
        plan = ShardingPlan(world_size=1, tables=placements)
        self.model = DistributedModelParallel(
            module, plan=plan, sparse_optimizer=RowWiseAdagrad(lr=0.01), seed=1, **options
        )
        parameters = [p for _, p in self.model.dense_parameters()]
        self.dense = torch.optim.SGD(parameters, 0.01) if parameters else None
        self.seconds = 0.0
        self.syncs: list[float] = []

    def step(self, batch: Batch) -> None:
        """One step, timed."""
        began = time.process_time()
        if self.dense is None:
            self.model(batch.sparse_features).values().mul(0.001).sum().backward()
        else:
            self.dense.zero_grad(set_to_none=True)
            self.model(batch)[0].backward()
            self.dense.step()
        self.seconds += time.process_time() - began

    def sync(self, number: int) -> None:
        """Set a sync point, timed."""
        began = time.process_time()
        assert self.model.undo is not None
        small = b"x" * 4 * sum(p.numel() for _, p in self.model.dense_parameters())
        self.model.undo.sync(Point(1, number), small)
        self.syncs.append(time.process_time() - began)
        self.seconds += self.syncs[-1]


def main() -> None:
    """Run and report."""
    args = parse()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    name = uuid.uuid4().hex
    contenders = {
        "plain": Contender(args),
        "stamps": Contender(args, track_rows=True),
        "sync points": Contender(args, memory=KeptMemory(name, 0)),
    }
    order = list(contenders.values())
    # The first two intervals make the memory of the logs, which later ones use again.
    warm = 2 * args.every
    for number in range(warm + args.steps):
        if number == warm:
            for one in order:
                one.seconds = 0.0
        if number % args.every == 0:
            contenders["sync points"].sync(number)
        batch = Batch(args, generator)
        order = order[1:] + order[:1]
        for one in order:
            one.step(batch)
    end_keepers()
    plain = contenders["plain"].seconds
    lines = ["| model | ms a step | against the plain one |", "|---|---|---|"]
    for label, one in contenders.items():
        ms = 1e3 * one.seconds / args.steps
        lines.append(f"| {label} | {ms:.2f} | {one.seconds / plain:.3f} |")
    sync_ms = 1e3 * sum(contenders["sync points"].syncs) / len(contenders["sync points"].syncs)
    lines.append(f"\na sync point takes {sync_ms:.1f} ms; load {os.getloadavg()[0]:.1f}")
    text = "\n".join(lines)
    print(vars(args))
    print(text)
    if args.write:
        results = {label: one.seconds for label, one in contenders.items()}
        print("written:", report.write("sync_points", results, text))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_points")
    add = parser.add_argument
    add("--steps", type=int, default=400)
    add("--every", type=int, default=200)
    add("--tables", type=int, default=26)
    add("--rows", type=int, default=200_000)
    add("--width", type=int, default=32)
    add("--batch", type=int, default=4096)
    add("--dense", action="store_true", help="a DLRM around the tables")
    add("--uniform", dest="skewed", action="store_false")
    add("--write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
