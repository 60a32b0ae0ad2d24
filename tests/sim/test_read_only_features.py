"""Read-only features of dynamic tables: they find the rows of other features' ids, give them their
gradients, and leave no trace of their own ids.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.dynamic.first_values import first_values
from rayrec.layout import (
    BaseEmbeddingConfig,
    DynamicConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.optim import SGD
from rayrec.sparse import KeyedJaggedTensor
from tests.sim.dynamic_worlds import (
    SEED,
    Model,
    alone,
    drifting,
    kjt_of,
    random_plan,
    random_rule,
    random_times,
    train,
)

RULE = DynamicConfig(blocks=1, read_only_features=("f",))


@pytest.mark.parametrize("kind", ["sum", "mean", "weighted", "sequence"])
def test_an_id_gets_its_row_by_another_feature_of_the_step(kind: str) -> None:
    # the read-only feature comes first, so the order of the lanes would be the wrong one
    names = {"name": "t", "feature_names": ["f", "g"], "dynamic": RULE}
    table: BaseEmbeddingConfig = EmbeddingConfig(8, 4, **names)
    if kind != "sequence":
        pooling = PoolingType.MEAN if kind == "mean" else PoolingType.SUM
        table = EmbeddingBagConfig(8, 4, pooling=pooling, **names)
    # gradients of row 10 by f and by g, where each output has a gradient of ones
    by_f, by_g = {"mean": (0.5, 1.0), "weighted": (2.0, 5.0)}.get(kind, (1.0, 1.0))

    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        batch = kjt_of({"f": [[10, 99]], "g": [[10]]})
        if kind == "weighted":
            batch = KeyedJaggedTensor(
                batch.keys(), batch.values(), torch.tensor([2.0, 3.0, 5.0]), batch.lengths()
            )
        output = module(batch)
        of_f: Tensor = output["f"].values() if kind == "sequence" else output["f"]
        of_g: Tensor = output["g"].values() if kind == "sequence" else output["g"]
        begun = first_values(SEED, table, np.array([10]), range(4))[0]
        torch.testing.assert_close(of_f[0], by_f * begun)
        torch.testing.assert_close(of_g[0], by_g * begun)
        assert kind != "sequence" or not of_f[1].any(), "99 has no row"
        (of_f.sum() + of_g.sum()).backward()
        (state,) = engine.shard_states()
        assert sorted(state.ids["id_key"].tolist()) == [-1] * 7 + [10]
        row = state.ids["id_key"].tolist().index(10)
        assert (state.ids["id_hits"][row], state.ids["id_seen"][row]) == (1, 1)
        torch.testing.assert_close(state.weight[row], begun - (by_f + by_g))

    alone(table, act, weighted=kind == "weighted")


@pytest.mark.seeds(range(20))
def test_ids_of_a_read_only_feature_change_no_other_id(seed: int) -> None:
    rng = random.Random(seed)
    ranks, blocks = rng.randint(1, 3), rng.choice([2, 4])
    rule = random_rule(rng, blocks)
    rule = replace(rule, read_only_features=("g",), feature_ttl_steps=None, feature_ttl_s=None)
    if rule.admission_threshold == 3:  # few ids come so often
        rule = replace(rule, admission_threshold=2)
    kind = rng.choice([EmbeddingConfig, EmbeddingBagConfig])
    tables = (kind(blocks * 6, 8, "t", feature_names=["f", "g"], dynamic=rule),)
    model = Model(tables, random_plan(tables, ranks, rng, SGD(lr=0.1)), SGD(lr=0.1))
    steps = drifting(rng, ranks, 10)
    # some ids are known at the end, whatever has grown old or was not let in
    often = list(range(101, 109))
    steps[-1][0] = {"f": [often, often], "g": [rng.choices(often, k=2), []]}
    times = random_times(rng, steps)
    without = [[{"f": bags["f"], "g": [[] for _ in bags["g"]]} for bags in step] for step in steps]

    def known(steps: list[list[dict[str, list[list[int]]]]]) -> dict[int, dict[str, int]]:
        columns = ("id_key", "id_seen", "id_hits")
        found = train(model, steps, times=times)[1]["t"]
        return {key: {name: told[name] for name in columns} for key, told in found.items()}

    assert known(steps) == known(without) and known(steps)


def test_a_table_may_have_no_other_feature() -> None:
    rule = replace(RULE, read_only_features=("f", "g"))
    table = EmbeddingBagConfig(8, 4, "t", feature_names=["f", "g"], dynamic=rule)

    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        assert not module(kjt_of({"f": [[10]], "g": [[11]]})).values().any()
        assert not engine.shard_states()[0].ids["id_hits"].any()

    alone(table, act)
