"""Features with a time to live of their own: an id lives for as long as the longest of those that
saw it, and is taken back as if it had been seen so much earlier.
"""

from __future__ import annotations

import pytest
import torch

from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.layout import BaseEmbeddingConfig, DynamicConfig, EmbeddingBagConfig, EmbeddingConfig
from tests.sim.dynamic_worlds import Bags, alone, kjt_of

STEPS = DynamicConfig(blocks=1, ttl_steps=4, feature_ttl_steps={"g": 1})
SECONDS = DynamicConfig(blocks=1, ttl_s=40, feature_ttl_s={"g": 10})
NOTHING: Bags = {"f": [[]], "g": [[]]}


def table_of(rule: DynamicConfig, kind: type[BaseEmbeddingConfig]) -> BaseEmbeddingConfig:
    return kind(8, 8, "t", feature_names=["f", "g"], dynamic=rule)


def knows(module: torch.nn.Module, *ids: int) -> list[bool]:
    """Whether ids have a row by now, looked up one by one."""
    found = []
    with torch.no_grad():
        for one in ids:
            output = module(kjt_of({"f": [[one]], "g": [[]]}))
            rows = output["f"].values() if isinstance(output, dict) else output.values()
            found.append(bool(rows.any()))
    return found


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
@pytest.mark.parametrize("rule", [STEPS, SECONDS], ids=["steps", "seconds"])
def test_an_id_lives_as_long_as_the_longest_feature_that_saw_it(
    rule: DynamicConfig, kind: type[BaseEmbeddingConfig]
) -> None:
    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        def step(bags: Bags, at: int) -> None:
            output = module(kjt_of(bags, 1000 + 10 * at))
            rows = [o.values() for o in output.values()] if isinstance(output, dict) else None
            (output.values() if rows is None else torch.cat(rows)).sum().backward()

        # 1 by f, 2 by g, 3 by both, in either order of the steps 4 and 5
        step({"f": [[1, 3, 4]], "g": [[2, 3, 5]]}, 1)
        step({"f": [[5]], "g": [[4]]}, 2)
        assert knows(module, 1, 2, 3, 4, 5) == [True] * 5
        step(NOTHING, 3)
        assert knows(module, 1, 2, 3, 4, 5) == [True, False, True, True, True]
        step(NOTHING, 5)
        step(NOTHING, 5)
        assert knows(module, 1, 3, 4, 5) == [True] * 4, "a short time takes nothing of a long one"
        step(NOTHING, 6)
        assert knows(module, 1, 3, 4, 5) == [False, False, False, True]

    alone(table_of(rule, kind), act)


def test_a_candidate_takes_its_time_along_to_its_row() -> None:
    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        for bags in ({"f": [[1]], "g": [[2]]}, {"f": [[]], "g": [[1, 2]]}):
            module(kjt_of(bags)).values().sum().backward()
        assert knows(module, 1, 2) == [True, True]
        for _ in range(3):
            module(kjt_of(NOTHING)).values().sum().backward()
        assert knows(module, 1, 2) == [True, False], "1 was seen by f in step 1"

    rule = DynamicConfig(blocks=1, admission_threshold=2, ttl_steps=4, feature_ttl_steps={"g": 1})
    alone(table_of(rule, EmbeddingBagConfig), act)


@pytest.mark.parametrize("unit", ["steps", "s"])
def test_a_candidate_of_a_short_time_outlasts_the_places_of_ids_that_got_a_row(unit: str) -> None:
    ttls = {f"ttl_{unit}": 100, f"feature_ttl_{unit}": {"g": 10}}
    rule = DynamicConfig(blocks=1, admission_threshold=2, counter_capacity=4, **ttls)

    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        def step(f: list[int], g: list[int], at: int) -> None:
            module(kjt_of({"f": [f], "g": [g]}, at)).values().sum().backward()

        step([1, 1, 2, 2], [], 0)
        step([3, 4, 5, 6], [], 0)
        step([3, 4, 5, 6], [], 0)
        for one in (10, 11, 10):
            step([], [one], 0)
        assert knows(module, 10, 11) == [True, False], "of four places, two were asked for"

    alone(table_of(rule, EmbeddingBagConfig), act)


@pytest.mark.parametrize("eviction", ["step", "timestamp"])
def test_ids_of_a_shorter_time_are_taken_back_as_if_seen_earlier(eviction: str) -> None:
    own = {"ttl_s": 40, "feature_ttl_s": {"g": 10}}
    if eviction == "step":
        own = {"ttl_steps": 40, "feature_ttl_steps": {"g": 10}}
    rule = DynamicConfig(blocks=1, eviction=eviction, **own)

    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        def step(bags: Bags, at: int) -> None:
            module(kjt_of(bags, 1000 + at)).values().sum().backward()

        step({"f": [list(range(4))], "g": [[]]}, 1)
        step({"f": [[]], "g": [list(range(10, 14))]}, 2)
        # ids of this very step keep their rows, whatever they count as
        step({"f": [[]], "g": [[10, 99]]}, 3)
        assert knows(module, *range(4), 10, 99) == [True] * 6
        assert knows(module, 11, 12, 13).count(False) == 1

    alone(table_of(rule, EmbeddingBagConfig), act)


@pytest.mark.parametrize(("now", "counts_as"), [(0, -30), (29, -2), (30, 0)])
def test_a_short_time_holds_where_the_clock_begins_at_zero(now: int, counts_as: int) -> None:
    """An id counts as seen before 1970 then, and never at -1, which stands for no time."""

    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        module(kjt_of({"f": [[1]], "g": [[2]]}, now)).values().sum().backward()
        (state,) = engine.shard_states()
        told = dict(zip(state.ids["id_key"].tolist(), state.ids["id_time"].tolist(), strict=True))
        assert (told[1], told[2]) == (now, counts_as)
        module(kjt_of({"f": [[1]], "g": [[]]}, now + 11)).values().sum().backward()
        assert knows(module, 1, 2) == [True, False]

    alone(table_of(SECONDS, EmbeddingBagConfig), act)
