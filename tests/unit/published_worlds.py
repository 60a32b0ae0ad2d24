"""Worlds for the tests of published chains: a click model that changes, and ranks as threads that
publish it under any plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from rayrec.checkpoint import Gather
from rayrec.layout import ShardingPlan
from rayrec.quant import PackedTables
from rayrec.quant.ids import PackedIds
from rayrec.serve import Manifest, ParityBounds, Predictor, export, exporting
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.writer import ChainWriter, Moment
from rayrec.serve.signing import SigningKey
from tests.unit.chain_worlds import touched_states
from tests.unit.checkpoint_worlds import Ranks, Truth, random_plan, save_world, shard_states
from tests.unit.serve_worlds import WIDTH, a_model, a_schema, config_of, dense_of, recipe_of

BOUNDS = ParityBounds(logit=1e9, auc=1.0, ne=1e9)
TYPES = ("fp32", "fp16", "int8", "int4")
State = tuple[list[Truth], dict[str, torch.Tensor]]


@dataclass
class PublishedWorld:
    """A model, and the ranks that publish it.

    Attributes:
        folder: of the chain.
        plan: of the ranks.
        truths, dense: the model now.
        step: of training.
    """

    folder: Path
    plan: ShardingPlan
    types: dict[str, str]
    extras: dict[str, object]
    truths: list[Truth]
    dense: dict[str, torch.Tensor]
    step: int = 0

    def __post_init__(self) -> None:
        self.touched = {truth.config.name: set[int]() for truth in self.truths}
        self.start_ranks(self.plan)

    def start_ranks(self, plan: ShardingPlan, key: SigningKey | None = None) -> None:
        """Publish from new ranks from now on, as after a failure."""
        tables = [truth.config for truth in self.truths]
        self.plan = plan
        self.writers = [
            ChainWriter(ChainFolder(self.folder), tables, self.types, rank, plan.world_size, key)
            for rank in range(plan.world_size)
        ]

    def train(self, rng: random.Random, scale: float = 1.0) -> None:
        """Change some rows and the dense part."""
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        for number, truth in enumerate(self.truths):
            rows = truth.config.num_embeddings
            chosen = sorted(rng.sample(range(rows), rng.choice([0, 1, rows // 4, rows])))
            weight = truth.weight.clone()
            weight[chosen] = torch.randn(len(chosen), weight.shape[1], generator=generator) * scale
            self.touched[truth.config.name].update(chosen)
            self.truths[number] = replace(truth, weight=weight)
        self.dense = {
            name: torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.dense.items()
        }
        self.step += rng.randint(1, 9)

    def publish(self) -> str:
        """Publish what has changed; returns the name of the publication."""
        moment = Moment(
            step=self.step,
            plan=self.plan,
            dense=self.dense,
            time=float(self.step),
            event_time=10 * self.step,
            ingest_time=self.step + 0.125,
        )

        def body(rank: int, gather: Gather) -> None:
            own, states = self.writers[rank], shard_states(self.truths, self.plan, rank)
            rows = {name: sorted(touched) for name, touched in self.touched.items()}
            if own.head is None or not own.publish_delta(
                touched_states(states, rows), moment, gather
            ):
                own.publish_base(states, moment, self.export, gather, self.extras)

        Ranks(self.plan.world_size).run(body).all()
        for touched in self.touched.values():
            touched.clear()
        assert len({writer.head for writer in self.writers}) == 1
        return self.writers[0].head.name

    def export(self, checkpoint: str, out: Path) -> Manifest:
        return export(checkpoint, out, types=self.types, bounds=BOUNDS, sample_rows=16)

    def fresh(self, out: Path) -> Predictor:
        """A predictor of an export of the model as it is now, from one rank."""
        checkpoint = f"{out}-checkpoint"
        save_world(
            checkpoint,
            self.truths,
            random_plan(random.Random(self.step), self.truths, 2),
            dense=self.dense,
            extras=self.extras,
            step=self.step,
        )
        self.export(checkpoint, out)
        return Predictor.load(out)


def published_world(folder: Path, seed: int, scale: float = 1.0, ranks: int = 0) -> PublishedWorld:
    """A click model of random rows, types and plan."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    schema = a_schema()
    module = a_model(schema).eval()
    truths = []
    for table in schema.tables:
        weight = torch.randn(table.num_embeddings, WIDTH) * scale
        squares = torch.rand(weight.shape, dtype=torch.float64)
        truths.append(Truth(config_of(table), "row", weight, squares))
    return PublishedWorld(
        folder=folder,
        plan=random_plan(rng, truths, ranks or rng.randint(1, 4)),
        types={truth.config.name: rng.choice(TYPES) for truth in truths},
        extras=dict(recipe_of(schema).to_extras()),
        truths=truths,
        dense=dense_of(module),
    )


@contextmanager
def without_programs() -> Iterator[None]:
    """Exports and publications lack the program of their dense part, which takes most of their
    time: for tests of rows. A decorator, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "export_program", lambda *given: "its rows alone are looked at")
        yield


def bytes_of(predictor: Predictor) -> dict[str, bytes]:
    """Table -> the bytes of its packed rows and of the ids that have them, and its power."""
    found = {}
    for collection in predictor.collections.values():
        packed: PackedTables = collection.packed
        for number, table in enumerate(packed.tables):
            rows = packed.rows_of(number).contiguous().numpy().tobytes()
            found[table.name] = rows + f" power {table.power}".encode()
            if (ids := packed.ids_of(number)) is not None:
                found[table.name] += ids.keys.numpy().tobytes()
                assert_found(ids)
    return found


def assert_found(ids: PackedIds) -> None:
    """The map of ids says of each key where it lies, and of no other."""
    (rows,) = (ids.keys != -1).nonzero(as_tuple=True)
    assert torch.equal(ids.find(ids.keys[rows]), rows)
    others = torch.randint(-(2**63), 2**63 - 1, (100,))
    assert (ids.find(others) == len(ids.keys)).all()


def assert_equal(one: Predictor, other: Predictor, rows: Sequence[dict]) -> None:
    """Two predictors have equal tables, byte for byte, and give equal scores."""
    assert bytes_of(one) == bytes_of(other)
    assert one.step == other.step
    assert torch.equal(one.predict(rows), other.predict(rows))
