"""The options of growth, the rows that follow from them, and the memory that a plan keeps free."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrec.data import FeatureSchema
from rayrec.driver.config import FailureConfig, RunConfig
from rayrec.driver.driver import Driver
from rayrec.driver.scaling import ScalingConfig
from rayrec.dynamic.first_values import first_values
from rayrec.errors import ConfigError
from rayrec.layout import (
    DynamicConfig,
    EmbeddingBagConfig,
    GrowthConfig,
    Topology,
    data_parallel,
    grid_shard,
    row_wise,
)
from rayrec.layout.schema_columns import Feature
from rayrec.planner import manual_plan
from rayrec.planner.estimate import estimate_ranks
from rayrec.planner.planner import plan_request
from rayrec.planner.remedies import NoPlan
from rayrec.planner.request import PlanRequest
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from tests.dynamic_clicks import TABLE, write
from tests.worlds import plan_for


def table(rows: int = 64, blocks: int | None = None, **growth: Any) -> EmbeddingBagConfig:
    rule = DynamicConfig(blocks=blocks, growth=GrowthConfig(**growth) if growth else None)
    return EmbeddingBagConfig(rows, 8, "t", feature_names=["f"], dynamic=rule)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_embeddings": 63}, r"'t' has num_embeddings=64 and max_num_embeddings=63"),
        ({"max_num_embeddings": 128, "max_load_factor": 1.0}, r"max_load_factor=1.0; it must be"),
        ({"max_num_embeddings": 128, "max_load_factor": 0.0}, r"max_load_factor=0.0; it must be"),
        ({"max_num_embeddings": 128, "every_n_steps": 0}, r"every_n_steps=0; it must be at least"),
        ({"max_num_embeddings": "many"}, r"GrowthConfig has max_num_embeddings='many'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        table(**options)


@pytest.mark.seeds(range(50))
def test_rows_double_up_to_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.choice([1, 2, 8])
    rows = blocks * rng.randint(1, 9)
    bound = rng.randint(rows, 40 * rows)
    one = table(rows, blocks, max_num_embeddings=bound, max_load_factor=0.5)
    doubled = [rows * 2**k for k in range(7) if rows * 2**k <= bound]
    assert one.most_rows == doubled[-1]
    wanted = rng.randint(0, 50 * rows)
    grown = one.fitting(wanted)
    enough = [number for number in doubled if number >= wanted]
    assert grown.num_embeddings == (enough or doubled[-1:])[0]
    assert grown.num_embeddings // grown.row_multiple == blocks
    assert grown.most_rows == one.most_rows
    ids = np.array([5, -7])
    assert torch.equal(first_values(1, grown, ids, range(8)), first_values(1, one, ids, range(8)))
    growth = one.dynamic.growth
    for held in (rows // 2, rows // 2 + 1):
        grows = held > 0.5 * rows and 2 * rows <= bound
        assert growth.next_rows(rows, held) == (2 * rows if grows else rows)


def test_a_table_without_growth_stays() -> None:
    plain = table()
    assert plain.fitting(1000) is plain and plain.most_rows == 64
    static = EmbeddingBagConfig(64, 8, "t", feature_names=["f"])
    assert static.fitting(1000) is static and static.most_rows == 64


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: row_wise(t, [0, 1, 2]),
        lambda t: grid_shard(t, [[0, 1], [2, 3]]),
        lambda t: data_parallel(t, [0, 1, 2, 3]),
    ],
)
def test_the_plan_of_a_grown_table_is_cut_at_the_same_blocks(layout: Any) -> None:
    one = table(64, 4, max_num_embeddings=1000)
    plan = plan_for(4, {"t": layout(one)})
    grown = one.fitting(200)
    wanted = plan_for(4, {"t": layout(grown)})
    assert plan.with_rows({"t": 256}) == wanted and wanted.rows == {"t": 256}
    wanted.check([grown], 4)
    assert wanted.with_rows(plan.rows) == plan


def test_a_schema_holds_growth() -> None:
    one = table(64, 4, max_num_embeddings=1000, max_load_factor=0.6, every_n_steps=7)
    schema = FeatureSchema(label="y", features=(Feature(name="f", column="f"),), tables=(one,))
    assert FeatureSchema.from_json(schema.to_json(), "here").tables == schema.tables


def test_a_run_whose_table_grows_has_no_sync_points(tmp_path: Path) -> None:
    growth = {"growth": {"max_num_embeddings": 128}}
    data = write(tmp_path / "data", TABLE | {"dynamic": growth})
    schema = (data / "schema.json").read_text()
    recipe = ModelRecipe(model="dlrm", schema=schema, dense_layers=(8,), over_layers=(8,))
    failure = FailureConfig(max_failures=1, sync_every_n_steps=2)
    run = RunConfig(global_batch_size=100, steps=4, failure=failure)
    clicks = open_data(str(data / "train"), schema)
    driver = Driver(recipe, clicks, ScalingConfig(num_workers=1), run)
    with pytest.raises(ConfigError, match=r"'t_user' has growth, and .*sync_every_n_steps=2"):
        driver.fit()


def memory(one: EmbeddingBagConfig) -> tuple[int, int]:
    """Bytes of weights and of the state of optimizers on a rank."""
    topology = Topology.local(1)
    request = PlanRequest(tables=[one], topology=topology, batch_size=16)
    plan = manual_plan([one], "table_wise", topology)
    (rank,) = estimate_ranks(request, plan)
    return rank.weight_bytes, rank.optimizer_bytes


def test_a_table_that_has_no_room_to_grow_is_told_as_such() -> None:
    topology = Topology.local(1, memory_bytes=1 << 20)
    for bound in (64, 1 << 20):
        request = PlanRequest(
            tables=[table(max_num_embeddings=bound)], topology=topology, batch_size=16
        )
        with nullcontext() if bound == 64 else pytest.raises(NoPlan, match="to grow to 1048576"):
            plan_request(request)


def test_a_table_that_has_no_room_for_its_candidates_is_told_as_such() -> None:
    rule = DynamicConfig(admission_threshold=2, counter_capacity=1 << 20)
    topology = Topology.local(1, memory_bytes=1 << 20)
    request = PlanRequest(tables=[replace(table(), dynamic=rule)], topology=topology, batch_size=16)
    with pytest.raises(NoPlan, match=r"B, with a counter_capacity of 1048576\) fits nowhere"):
        plan_request(request)


def test_a_plan_keeps_memory_free_for_the_last_doubling() -> None:
    """A table of the bound's rows, and half of them once more, which it grows from."""
    weights, state = memory(table())
    for bound, times in ((64, 1), (127, 1), (128, 3), (1000, 12)):
        assert memory(table(max_num_embeddings=bound)) == (times * weights, times * state)


def test_a_plan_prices_the_candidates_that_a_table_keeps() -> None:
    """150 bytes a row and 128 a candidate for ids, and columns of 22 for whole rows of places."""
    size, growth = 64 * 4, GrowthConfig(max_num_embeddings=256)
    for capacity, a_candidate in ((None, 150), (64, 150), (16, 22 + 32), (96, 2 * 22 + 192)):
        rule = DynamicConfig(admission_threshold=2, counter_capacity=capacity, blocks=8)
        one = EmbeddingBagConfig(64, 8, "t", feature_names=["f"], dynamic=rule)
        assert memory(one)[1] == size + 64 * (150 + a_candidate)
    # 128 rows of 96 candidates lie beside 256 while they grow for the last time
    rule = replace(rule, growth=growth)
    grown = memory(replace(one, dynamic=rule))[1]
    assert grown == 6 * (size + 64 * (150 + 22)) + 2 * 96 * 128
