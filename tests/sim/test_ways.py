"""A way is a file of its own and a line of the registry: a small one trains as the others do."""

from __future__ import annotations

import pytest
import torch

from rayrec.comm import SimulatedWorld
from rayrec.distributed import ways
from rayrec.distributed.ways.exchanged import Exchanged
from rayrec.distributed.ways.in_place import InPlace
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig, column_wise, row_wise, table_wise
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor
from tests.sim.plain_way import Plain
from tests.simulation import sharded
from tests.worlds import plan_for

RANKS = 3
FEATURES = ["f0", "f1", "f2"]


def train():
    """Train three collections for three steps: outputs, rows by shard, and the ways taken."""
    pooled = [
        EmbeddingBagConfig(40, 8, name=f"t{i}", feature_names=[feature])
        for i, feature in enumerate(FEATURES)
    ]
    cut = EmbeddingBagConfig(40, 8, name="cut", feature_names=["f0"])
    sequence = EmbeddingConfig(40, 8, name="s", feature_names=["f1"])
    layouts = {
        "t0": table_wise(pooled[0], 2),
        "t1": column_wise(pooled[1], (1, 0)),
        "t2": table_wise(pooled[2], 0),
        "cut": row_wise(cut, range(RANKS)),
        "s": table_wise(sequence, 1),
    }
    plan = plan_for(RANKS, layouts)

    def rank_main(exchange):
        random = torch.Generator().manual_seed(exchange.rank)  # ranks are threads of one process
        model = torch.nn.ModuleList(
            [
                EmbeddingBagCollection(pooled, device="meta"),
                EmbeddingBagCollection([cut], device="meta"),
                EmbeddingCollection([sequence], device="meta"),
            ]
        )
        model, engine = sharded(model, plan, exchange, RowWiseAdagrad(lr=0.1), seed=5)
        outputs = []
        for step in range(3):
            lengths = torch.randint(0, 4, (3 * (4 + exchange.rank),), generator=random)
            ids = torch.randint(40, (int(lengths.sum()),), generator=random)
            kjt = KeyedJaggedTensor(FEATURES, ids, lengths=lengths)
            found = [model[0](kjt).values(), model[1](kjt).values(), model[2](kjt)["f1"].values()]
            outputs += [output.detach().clone() for output in found]
            torch.cat([(o * (step + 1)).reshape(-1).sin() for o in found]).sum().backward()
        rows = {str(state.shard): state.weight.clone() for state in engine.shard_states()}
        return outputs, rows, [type(way) for way in engine.deployed.way_of]

    return SimulatedWorld(RANKS).run(rank_main)


def test_a_way_is_one_more_line_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = train()
    monkeypatch.setattr(ways, "WAYS", [Plain, *ways.WAYS])
    plain = train()
    for (outputs, rows, kinds), (all_outputs, all_rows, all_kinds) in zip(
        plain, usual, strict=True
    ):
        assert kinds[0] is Plain and Plain not in kinds[1:]
        assert set(all_kinds) <= {InPlace, Exchanged} and rows.keys() == all_rows.keys()
        for got, want in zip(outputs, all_outputs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for shard, weight in rows.items():
            torch.testing.assert_close(weight, all_rows[shard], rtol=1e-5, atol=1e-6)


def test_the_first_way_that_takes_a_collection_has_it() -> None:
    for _, _, kinds in train():
        assert kinds == [InPlace] * 3
