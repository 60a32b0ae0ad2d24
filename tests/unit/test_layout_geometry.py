"""Layouts tile their tables exactly once, kinds are what their names say, and wrong cuts are
refused.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from rayrec.errors import ConfigError, PlanError
from rayrec.layout import (
    KINDS,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Layout,
    PoolingType,
    Replicated,
    Shard,
    TableLayout,
    check_tables,
    column_wise,
    data_parallel,
    even_cuts,
    grid_shard,
    kind_of,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tests.unit.plan_worlds import random_layout

HOSTS = ((0, 1), (2, 3))
RANKS = (0, 1, 2, 3)


@pytest.mark.seeds(range(60))
def test_every_cell_belongs_to_one_shard(seed: int) -> None:
    rng = random.Random(seed)
    rows, dim = rng.randrange(1, 40), 4 * rng.randrange(1, 8)
    layout = random_layout(rng, rows, dim, world_size=4)
    copies = 4 if isinstance(layout, Replicated) else 1
    count = [[0] * dim for _ in range(rows)]
    for shard in layout.shards("t"):
        for row in shard.rows:
            for col in shard.cols:
                count[row][col] += 1
    assert all(cell == copies for line in count for cell in line)
    assert layout.shape == (rows, dim)
    assert set(layout.ranks) == {shard.rank for shard in layout.shards("t")}


@pytest.mark.seeds(range(30))
def test_row_block_finds_the_shard_that_holds_a_row(seed: int) -> None:
    rng = random.Random(seed)
    layout = TableLayout((0, 3, 4, 9, 20), (0, 8), ((0,), (1,), (2,), (0,)))
    row = rng.randrange(20)
    block = layout.row_block(row)
    assert layout.row_cuts[block] <= row < layout.row_cuts[block + 1]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 100])
def test_even_cuts_differ_by_at_most_one(size: int, blocks: int) -> None:
    parts = [b - a for a, b in pairwise(even_cuts(size, blocks))]
    assert sum(parts) == size and len(parts) == min(size, blocks) and max(parts) - min(parts) <= 1


@pytest.mark.parametrize("size", [1, 3, 4, 5, 10, 61])
@pytest.mark.parametrize("blocks", [1, 2, 3, 100])
def test_even_cuts_are_multiples_but_for_the_last(size: int, blocks: int) -> None:
    cuts = even_cuts(size, blocks, 4)
    parts = [b - a for a, b in pairwise(cuts)]
    assert cuts[-1] == size and all(cut % 4 == 0 for cut in cuts[:-1]) and min(parts) > 0
    assert (
        len(parts) == min(-(-size // 4), blocks)
        and max(parts) - min(parts[:-1], default=max(parts)) <= 4
    )


@pytest.mark.parametrize(("size", "blocks", "multiple"), [(0, 1, 1), (4, 0, 1)])
def test_impossible_cuts_are_refused(size: int, blocks: int, multiple: int) -> None:
    with pytest.raises(PlanError, match=rf"cannot cut {size} into {blocks}"):
        even_cuts(size, blocks, multiple)


def test_each_kind_is_recognised_by_its_name() -> None:
    table = EmbeddingBagConfig(100, 32, "t", feature_names=["f"])
    made: dict[str, Layout] = {
        "table_wise": table_wise(table, 2),
        "row_wise": row_wise(table, RANKS),
        "column_wise": column_wise(table, RANKS),
        "table_row_wise": table_row_wise(table, HOSTS[1]),
        "table_column_wise": table_column_wise(table, HOSTS[0]),
        "grid_shard": grid_shard(table, HOSTS),
        "data_parallel": data_parallel(table, RANKS),
    }
    assert set(made) == set(KINDS)
    assert {name: kind_of(layout, HOSTS) for name, layout in made.items()} == {
        name: name for name in made
    }
    # each column block spans both hosts
    mixed = TableLayout((0, 50, 100), (0, 16, 32), ((0, 1), (2, 3)))
    assert kind_of(mixed, HOSTS) == "product_grid"


def test_tables_smaller_than_the_world_get_fewer_blocks() -> None:
    table = EmbeddingBagConfig(2, 4, "t", feature_names=["f"])
    assert row_wise(table, RANKS) == TableLayout((0, 1, 2), (0, 4), ((0,), (1,)))
    assert column_wise(table, RANKS) == TableLayout((0, 2), (0, 4), ((0,),))
    with pytest.raises(PlanError, match=r"equally many ranks, got \[1, 2\]"):
        grid_shard(table, ((0,), (1, 2)))
    with pytest.raises(PlanError, match="given 0; it takes the ranks of each host"):
        grid_shard(table, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [0, None, "01", [[0]], [1.0]], ids=str)
@pytest.mark.parametrize("kind", [row_wise, column_wise, data_parallel, table_wise])
def test_a_kind_takes_numbers_of_ranks(kind, ranks) -> None:  # type: ignore[no-untyped-def]
    given = [ranks] if kind is table_wise and ranks == 0 else ranks
    with pytest.raises(PlanError, match=r"^\w+ was given .*; .* numbers of ranks, such as range"):
        kind(EmbeddingBagConfig(8, 8, "t", feature_names=["f"]), given)


@pytest.mark.parametrize(
    ("row_cuts", "col_cuts", "owners", "message"),
    [
        ((0,), (0, 4), (), "row_cuts"),
        ((1, 5), (0, 4), ((0,),), "start at 0"),
        ((0, 5, 5), (0, 4), ((0,), (1,)), "strictly increase"),
        ((0, 5), (0, 6, 10), ((0, 1),), "multiple of 4"),
        ((0, 5), (0, 4), ((0,), (1,)), "1 rows of 1"),
        ((0, 5), (0, 4, 8), ((0,),), "1 rows of 2"),
        ((0, 5), (0, 4), ((-1,),), "negative"),
    ],
)
def test_cuts_that_do_not_tile_are_refused(row_cuts, col_cuts, owners, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=message):
        TableLayout(row_cuts, col_cuts, owners)


@pytest.mark.parametrize("ranks", [(), (0, 0)])
def test_a_replica_needs_distinct_ranks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="distinct ranks"):
        Replicated(3, 4, ranks)


@pytest.mark.seeds(range(40))
def test_intersection_holds_the_cells_of_both(seed: int) -> None:
    rng = random.Random(seed)

    def rectangle() -> Shard:
        (r0, r1), (c0, c1) = sorted(rng.sample(range(8), 2)), sorted(rng.sample(range(8), 2))
        return Shard("t", range(r0, r1), range(c0, c1), 0)

    def cells(rows: range, cols: range) -> set[tuple[int, int]]:
        return {(row, col) for row in rows for col in cols}

    a, b = rectangle(), rectangle()
    common = a.intersect(b)
    assert (cells(*common) if common else set()) == cells(a.rows, a.cols) & cells(b.rows, b.cols)
    assert a.intersect(Shard("other", a.rows, a.cols, 0)) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EmbeddingBagConfig(0, 8, "t"), "num_embeddings=0"),
        (lambda: EmbeddingBagConfig(5, 0, "t"), "embedding_dim=0; it needs at least one column"),
        (lambda: EmbeddingBagConfig(5, 8, "t", feature_names=["a", "b", "a"]), "feature 'a' twice"),
        (lambda: EmbeddingBagConfig(5, 8, "t", pooling=PoolingType.NONE), "use EmbeddingConfig"),
        (
            lambda: EmbeddingBagConfig(5, 8, "t", input_dim=9),
            "input_dim=9, .* dynamic=DynamicConfig",
        ),
        (lambda: EmbeddingConfig(5, 8, "t", use_virtual_table=True), "use_virtual_table=True"),
        (
            lambda: EmbeddingBagConfig(5, 8, "t", weight_init_min=2.0, weight_init_max=1.0),
            "above weight_init_max",
        ),
        (
            lambda: EmbeddingBagConfig(5, 8, "t", weight_init_max=1e39),
            r"weight_init_max=1e\+39; in FP32 they may be 3.403e\+38 from 0 and from each other",
        ),
        (lambda: EmbeddingBagConfig(5, 8, "t", weight_init_max=math.nan), "max=nan; in FP32"),
        (
            lambda: EmbeddingBagConfig(5, 8, "t", weight_init_min=-3e38, weight_init_max=3e38),
            "from each other",
        ),
        (
            lambda: EmbeddingBagConfig(5, 8, "t", DataType.FP16, weight_init_min=-1e5),
            "in FP16 they may be 6.55e\\+04",
        ),
        (lambda: check_tables([EmbeddingBagConfig(5, 8, "", feature_names=["a"])]), "no name"),
        (
            lambda: check_tables([EmbeddingBagConfig(5, 8, "t", feature_names=["a"])] * 2),
            "'t' is named twice",
        ),
        (lambda: check_tables([EmbeddingBagConfig(5, 8, "t")]), "'t' has no feature_names"),
    ],
)
def test_tables_that_contradict_themselves_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_table_knows_its_bytes_and_bounds() -> None:
    table = EmbeddingConfig(100, 8, "t", DataType.FP16, ["a", "b"])
    assert (table.data_type.num_bytes, table.num_features(), table.pooling) == (
        2,
        2,
        PoolingType.NONE,
    )
    assert table.init_bounds() == (-0.1, 0.1)
    assert (table.get_weight_init_min(), table.get_weight_init_max()) == (-0.1, 0.1)
    assert replace(table, weight_init_min=-0.5).get_weight_init_min() == -0.5
    assert EmbeddingConfig(100, 8, "t", DataType.FP16, ["a", "b"], need_pos=True) == table
