"""Ids that a pipeline sends ahead: those of the batch, and those that a model makes itself."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.layout import Topology
from rayrec.models import TwoTower, TwoTowerTrain
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.ahead import find_kjts
from tests.gloo.piped import PIPELINES, count_prefetches
from tests.ranks import RankPool


class OwnIds(nn.Module):
    """Half of its ids come with the batch, half it weighs itself."""

    def __init__(self) -> None:
        super().__init__()
        table = lambda name: [EmbeddingBagConfig(20, 8, name=f"t_{name}", feature_names=[name])]  # noqa: E731
        self.plain = EmbeddingBagCollection(table("a"), device="meta")
        weighted = EmbeddingBagCollection(table("b"), is_weighted=True, device="meta")
        self.learned = FeatureProcessedEmbeddingBagCollection(
            weighted, PositionWeightedModuleCollection({"b": 3})
        )

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.plain(batch.ids).values().sum(1) + self.learned(batch.others).values().sum(1)
        loss = (out - batch.wanted).square().mean()
        return loss, out.detach()


def ids_of(step: int, rank: int, rows: int = 6, shared: bool = True) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = KeyedJaggedTensor(
        ["a", "b"],
        torch.randint(0, 20, (2 * rows * 3,), generator=generator),
        lengths=torch.full((2 * rows,), 3),
    )
    ids, others = (ids, ids) if shared else ids.split([1, 1])
    return SimpleNamespace(ids=ids, others=others, wanted=torch.rand(rows, generator=generator))


def own_ids(
    rank: int, world_size: int, kind: str, shared: bool
) -> tuple[list[float], list[str], int]:
    torch.manual_seed(0)
    module = OwnIds()
    plan = manual_plan(
        table_configs(module), "row_wise", Topology.local(world_size, memory_bytes=1 << 30)
    )
    model = DistributedModelParallel(module, plan=plan, prefetch=True)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    started = count_prefetches(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = list(
            PIPELINES[kind](model, dense, "cpu").iterate(
                ids_of(i, rank, shared=shared) for i in range(5)
            )
        )
    assert not model._engine._ahead  # nothing is left under way
    return (
        [float(s.loss) for s in steps],
        [str(w.message) for w in caught if w.category is RuntimeWarning],
        sum(started),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_ids_that_the_model_makes_itself_work_unpipelined_with_one_warning(
    ranks: RankPool, shared: bool
) -> None:
    runs = zip(
        ranks.run(2, own_ids, "sparse", shared), ranks.run(2, own_ids, "base", shared), strict=True
    )
    for (got, said, started), (wanted, nothing, _) in runs:
        assert got == wanted and not nothing
        # the other collection's own KJT still travels ahead, unless keys are ambiguous
        assert started == (0 if shared else 4)
        assert len(said) == 1 and said[0].startswith(
            "learned._embedding_bag_collection gets a KeyedJaggedTensor that is not the batch's"
        )


def two_towers(rank: int, world_size: int, kind: str) -> list[float]:
    torch.manual_seed(0)
    table = lambda name: EmbeddingBagCollection(  # noqa: E731
        [EmbeddingBagConfig(20, 8, name=f"t_{name}", feature_names=[name])], device="meta"
    )
    module = TwoTowerTrain(
        TwoTower(table("a"), [8], table("b")), temperature=0.1, candidate_id=None
    )
    plan = manual_plan(
        table_configs(module), "row_wise", Topology.local(world_size, memory_bytes=1 << 30)
    )
    model = DistributedModelParallel(module, plan=plan, prefetch=True)
    batches = [
        SimpleNamespace(sparse_features=b.ids, labels=torch.ones(6))
        for b in (ids_of(i, rank) for i in range(6))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return [
            float(s.loss)
            for s in PIPELINES[kind](
                model, torch.optim.SGD(model.parameters(), 0.1), "cpu"
            ).iterate(batches)
        ]


def one_tower(rank: int, world_size: int) -> None:
    """After steps of both towers, ids of one tower alone are embedded as before."""
    table = lambda name: EmbeddingBagCollection(  # noqa: E731
        [EmbeddingBagConfig(20, 8, name=f"t_{name}", feature_names=[name])], device="meta"
    )
    towers = TwoTower(table("a"), [8], table("b"))
    plan = manual_plan(
        table_configs(towers), "row_wise", Topology.local(world_size, memory_bytes=1 << 30)
    )
    model = DistributedModelParallel(towers, plan=plan, seed=0)
    model.eval()
    with torch.no_grad():
        both = ids_of(0, rank).ids
        wanted = [vectors.clone() for vectors in model(both)]
        assert torch.equal(model.module.query(both.split([1, 1])[0]), wanted[0])
        assert torch.equal(model.module.candidate(both.split([1, 1])[1]), wanted[1])
        for got, vectors in zip(model(both), wanted, strict=True):
            assert torch.equal(got, vectors)


def test_a_collection_whose_features_are_missing_takes_no_part(ranks: RankPool) -> None:
    ranks.run(2, one_tower)


def test_collections_that_share_a_batch_share_its_prefetch(ranks: RankPool) -> None:
    assert ranks.run(2, two_towers, "sparse") == ranks.run(2, two_towers, "base")


def test_ids_are_found_wherever_a_batch_keeps_them() -> None:
    @dataclass(slots=True)
    class Inner:
        ids: KeyedJaggedTensor
        other: int = 0

    class Named(NamedTuple):
        first: Any
        second: Any

    a, b, c = (ids_of(i, 0).ids for i in range(3))
    assert find_kjts(a) == [a]
    assert find_kjts(SimpleNamespace(x=[b, (a, {"k": Inner(c)})], y=a, z=torch.ones(1))) == [
        b,
        a,
        c,
    ]
    assert find_kjts(Named(Inner(a), {"k": b})) == [a, b]
    assert find_kjts(torch.ones(1)) == []
