"""A plan makes sense by itself, fits its tables and world, tells what changed, and prints within
100 columns.
"""

from __future__ import annotations

import pickle
import random

import pytest

from rayrec.errors import ConfigError, PlanError
from rayrec.layout import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    Replicated,
    ShardingPlan,
    Storage,
    TableLayout,
    TablePlacement,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from rayrec.layout.diff import moved_shards
from rayrec.layout.units import fit, format_bytes, format_count, format_ms, format_ranks
from tests.unit.plan_worlds import random_layout, random_plan
from tests.worlds import plan_for


def bag(name: str, rows: int = 8, dim: int = 16) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, dim, name, feature_names=[f"f_{name}"])


def plan_of(world_size: int = 2, **layouts) -> ShardingPlan:  # type: ignore[no-untyped-def]
    return plan_for(world_size, layouts)


def test_shards_are_those_of_the_tables_in_plan_order() -> None:
    b, a = bag("b"), bag("a")
    plan = plan_of(b=row_wise(b, (0, 1)), a=table_wise(a, 1))
    assert [(s.table, s.rank, s.rows, s.cols) for s in plan.shards()] == [
        ("b", 0, range(4), range(16)),
        ("b", 1, range(4, 8), range(16)),
        ("a", 1, range(8), range(16)),
    ]
    assert plan.shards(0) == plan.shards()[:1] and plan.shards(1) == plan.shards()[1:]
    assert plan.hosts == ((0, 1),) and plan.kind("b") == "row_wise"


@pytest.mark.seeds(range(20))
def test_a_plan_survives_pickling(seed: int) -> None:
    plan = random_plan(seed)
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_of(0), "world_size=0"),
        (lambda: plan_of(2**60), "world_size=1152921504606846976 is beyond"),
        (lambda: plan_of(2, t=table_wise(bag("t"), 2)), "'t' has a shard on rank 2.*ranks 0 to 1"),
        (
            lambda: plan_of(3, t=data_parallel(bag("t"), (0, 1))),
            r"'t' is replicated on ranks \(0, 1\).*all 3",
        ),
        (
            lambda: ShardingPlan(world_size=1, tables={"t": table_wise(bag("t"), 0)}),
            r"'t' has a TableLayout in the plan; give TablePlacement\(layout\)",
        ),
        (
            lambda: ShardingPlan(world_size=2, tables={}, hosts=((0,), (1,), (2,))),
            "hosts name 3 ranks.*world_size=2",
        ),
        (lambda: ShardingPlan(world_size=2, tables={}, hosts=((1,), (0,))), "in order"),
        (lambda: ShardingPlan(world_size=1, tables={}, hosts=((0,), ())), "at least one per host"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=message):
        make()


def test_unknown_storage_is_refused() -> None:
    with pytest.raises(ConfigError, match="'disk' is unknown"):
        Storage("disk")  # type: ignore[arg-type]
    for kind, factor in (("cached", None), ("cached", 0.0), ("cached", 1.5), ("host", 0.2)):
        with pytest.raises(ConfigError, match="load_factor"):
            Storage(kind, factor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tables", "world_size", "message"),
    [
        ([bag("a"), bag("b")], 4, "plan is for 2 ranks, the world has 4"),
        ([bag("a"), bag("b"), bag("c")], 2, "no table 'c' .1 of the model's 3"),
        ([bag("a")], 2, "places table 'b', which the model does not have"),
        ([bag("a"), bag("b", rows=9)], 2, "'b' as 8 x 16, the model has 9 x 16"),
        ([bag("a", dim=12), bag("b")], 2, "'a' as 8 x 16, the model has 8 x 12"),
    ],
)
def test_check_refuses_a_plan_for_another_model_or_world(
    tables: list[BaseEmbeddingConfig], world_size: int, message: str
) -> None:
    plan = plan_of(a=table_wise(bag("a"), 0), b=row_wise(bag("b"), (0, 1)))
    plan.check([bag("b"), bag("a")], 2)
    with pytest.raises(PlanError, match=message):
        plan.check(tables, world_size)


@pytest.mark.seeds(range(60))
def test_moves_bring_exactly_the_cells_a_rank_did_not_hold(seed: int) -> None:
    rng = random.Random(seed)
    rows, dim = rng.randrange(1, 12), 4 * rng.randrange(1, 4)
    old, new = (random_layout(rng, rows, dim, world_size=3) for _ in range(2))

    def held(layout: TableLayout | Replicated) -> set[tuple[int, int, int]]:
        return {(s.rank, row, col) for s in layout.shards("t") for row in s.rows for col in s.cols}

    moves = moved_shards("t", TablePlacement(old), TablePlacement(new))
    arriving = [(s.rank, row, col) for s, _ in moves for row in s.rows for col in s.cols]
    assert len(arriving) == len(set(arriving))
    assert set(arriving) == held(new) - held(old)
    assert all(
        (source, row, col) in held(old) for s, source in moves for row in s.rows for col in s.cols
    )


def test_diff_tells_kinds_rectangles_and_bytes() -> None:
    a, b, c = bag("a"), bag("b"), bag("c")
    before = plan_of(a=table_wise(a, 0), b=table_wise(b, 1), gone=table_wise(c, 0))
    after = plan_of(a=row_wise(a, (0, 1)), b=table_wise(b, 1), c=column_wise(c, (0, 1)))
    assert before.diff(before) == "The plans are equal."
    assert before.diff(after, [a, b, c]).splitlines() == [
        "a: table_wise -> row_wise, 256 B in 1 rectangles move",
        "    rows 4:8 cols 0:16  rank 0 -> 1  256 B",
        "gone: removed (was table_wise)",
        "c: added as column_wise",
        "3 of 4 tables change.",
    ]
    assert "64 elements in 1 rectangles move" in before.diff(after)


def test_diff_tells_ranks_order_size_and_storage() -> None:
    a, b = table_wise(bag("a"), 0), table_wise(bag("b"), 0)
    assert "ranks: 2 -> 3" in plan_of(2, a=a).diff(plan_of(3, a=a))
    assert "another order" in repr(
        ShardingPlan.diff(plan_of(a=a, b=b), plan_of(b=b, a=table_wise(bag("a"), 1)))
    )
    assert "resized 8 x 16 -> 9 x 16" in plan_of(a=a).diff(
        plan_of(a=table_wise(bag("a", rows=9), 0))
    )
    host = ShardingPlan(world_size=2, tables={"a": TablePlacement(a, Storage("host"))})
    assert "a: table_wise -> table_wise, storage device -> host, nothing moves" in plan_of(
        a=a
    ).diff(host)
    cached = ShardingPlan(world_size=2, tables={"a": TablePlacement(a, Storage("cached", 0.25))})
    assert "storage host -> cached 25%, nothing moves" in host.diff(cached)
    assert (
        "storage cached 25%: 1 of 1 tables: a" in cached.report()
        and "storage" not in plan_of(a=a).report()
    )


@pytest.mark.seeds(range(20))
def test_a_report_without_estimates_has_every_rank_and_table(seed: int) -> None:
    plan = random_plan(seed)
    lines = plan.report().splitlines()
    assert all(len(line) <= 100 for line in lines)
    text = plan.report()
    assert f"{len(plan.tables)} table" in text and f"{plan.world_size} rank" in text
    assert all(name in text for name in plan.tables)


def test_a_long_report_ends_in_a_number() -> None:
    tables = [bag(f"table_with_a_long_name_{i}") for i in range(75)]
    plan = plan_for(70, {t.name: table_wise(t, i % 70) for i, t in enumerate(tables)})
    lines = plan.report().splitlines()
    assert "... and 15 more tables" in lines and "... and 6 more ranks" in lines


def test_numbers_are_short_and_right() -> None:
    assert [format_bytes(b) for b in (0, 999, 1000, 1_234_567, 99_960_000, 61_200_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.2 MB",
        "100 MB",
        "61.2 GB",
    ]
    assert [format_count(n) for n in (7, 40_000_000, 999_600)] == ["7", "40.0M", "1.0M"]
    assert [format_ms(s) for s in (0.0, 0.00123456, 0.0123, 1.5)] == [
        "0.000",
        "1.235",
        "12.3",
        "1500",
    ]
    assert format_ranks((5, 0, 1, 2, 7)) == "0-2,5,7" and format_ranks((3,)) == "3"
    assert (fit("abcdef", 6), fit("abcdefg", 6)) == ("abcdef", "abcd..")
