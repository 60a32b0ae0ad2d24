"""Worlds of dynamic tables in which nothing depends on the order of sums, so that all that is known
of ids is equal bit for bit on any ranks.

Bags are summed, weights are halves, and the loss is straight: all gradients are multiples of an
eighth. Ids and counters are those of the twin in plain Python, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rayrec.layout import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType, ShardingPlan
from tests.sim.dynamic_worlds import (
    KEYS,
    SEED,
    Bags,
    Model,
    Times,
    drifting,
    growing,
    joined,
    latest,
    random_model,
    random_plan,
    random_rule,
    random_times,
    straight,
    train,
)
from tests.sim.known_ids import Known, candidates_of
from tests.unit.dynamic_twin import Place, Twin

STEPS = 10
HOSTS = {4: ((0, 1), (2, 3)), 2: ((0,), (1,))}


@dataclass(frozen=True)
class ExactWorld:
    """What is trained, and on what; `one` is the same model on one rank."""

    model: Model
    one: Model
    steps: list[list[Bags]]
    times: Times
    plans: dict[int, ShardingPlan]
    grows: frozenset[int]
    in_place: bool

    def known(self, run_ranks: Callable[..., list[Any]] | None = None) -> Known:
        """What the ranks know in the end."""
        return train(
            self.model,
            self.steps,
            self.plans,
            times=self.times,
            grows=self.grows,
            in_place=self.in_place,
            run_ranks=run_ranks,
            loss=straight,
        )[1]

    def known_to_one(self) -> Known:
        """What one rank knows that has the batches of all."""
        whole, times = [[joined(step)] for step in self.steps], latest(self.times)
        return train(self.one, whole, times=times, grows=self.grows, loss=straight)[1]


def exact_world(seed: int, ranks: int | None = None) -> ExactWorld:
    """A world that is a function of the arguments, of 1 to 4 ranks unless given."""
    rng = random.Random(seed)
    drawn, blocks = rng.choice([1, 2, 3, 4, 4]), rng.choice([2, 4, 8])
    ranks = ranks or drawn
    rows = blocks * rng.choice([2, 5, 12])
    rules = random_rule(rng, blocks, read_only=(rng.choice(KEYS),)), random_rule(rng, blocks)
    grows: frozenset[int] = frozenset()
    if rng.random() < 0.5:
        rules = growing(rng, rules[0], rows), rules[1]
        grows = frozenset(number for number in range(STEPS) if rng.random() < 0.4)
    model = random_model(rng, ranks, rules, rows)
    tables = tuple(summed(table) for table in model.tables)
    pooled = isinstance(tables[0], EmbeddingBagConfig)
    hosts = HOSTS.get(ranks, ()) if rng.random() < 0.5 else ()

    def plan(ranks: int, hosts: tuple[tuple[int, ...], ...] = ()) -> ShardingPlan:
        return random_plan(tables, ranks, rng, model.optimizer, hosts)

    weighted = pooled and rng.random() < 0.4
    model = Model(tables, plan(ranks, hosts), model.optimizer, weighted)
    steps = drifting(rng, ranks, STEPS)
    return ExactWorld(
        model,
        replace(model, plan=plan(1)),
        steps,
        random_times(rng, steps),
        {number: plan(ranks, hosts) for number in (3, 7) if rng.random() < 0.7},
        grows,
        in_place=rng.random() < 0.5,
    )


def summed(table: BaseEmbeddingConfig) -> BaseEmbeddingConfig:
    """The table, with sums of bags: a mean of three is rounded."""
    is_bag = isinstance(table, EmbeddingBagConfig)
    return replace(table, pooling=PoolingType.SUM) if is_bag else table


def check_twins(world: ExactWorld, known: Known) -> None:
    """Ids, candidates and their counters are those of plain Python."""
    for table in world.model.tables:
        twin = twin_of(world, table)
        found = {
            one: [told[name] for name in ("id_seen", "id_hits", "id_time") if name in told]
            for one, told in known.get(table.name, {}).items()
        }
        assert found == counters(twin.rows)
        waiting = known.get(candidates_of(table.name), {})
        assert {one: [*told.values()] for one, told in waiting.items()} == counters(twin.waiting)


def counters(places: list[Place]) -> dict[int, list[int]]:
    """What is known of the ids of a twin: step, count, and time where the table uses it."""
    found = {}
    for place in places:
        for one, known in place.ids.items():
            seen, time = place.stamps(one)
            found[one] = [seen, known.count, *([time] if place.rule.uses_time else [])]
    return found


def twin_of(world: ExactWorld, table: BaseEmbeddingConfig) -> Twin:
    """The twin of a table after all steps."""
    twin = Twin(table, SEED)
    keys = [key for key in table.feature_names if key not in twin.rule.read_only_features]
    times = latest(world.times)
    for number, step in enumerate(world.steps):
        if number in world.grows and twin.rule.growth is not None:
            twin.grow(number)
        bags, (time,) = joined(step), times[number]
        seen = [(one, key) for key in keys for bag in bags[key] for one in bag]
        features = [key for _, key in seen]
        twin.step([one for one, _ in seen], number + 1, -1 if time is None else time, features)
    return twin
