"""Sync points of dynamic tables: rows, ids and candidates are put back, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrec.comm import SimulatedWorld
from rayrec.distributed import shard_embeddings
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import DynamicConfig
from rayrec.shards.undo import Point
from tests.memory import MemoryHere
from tests.sim.dynamic_worlds import SEED, Bags, Model, random_model, random_steps, rows_of

STEPS, ROWS = 6, 16
TIMES = [100, 130, 125, 200, 90, 260]  # of the steps
RULES = (
    DynamicConfig(blocks=2, admission_threshold=2, ttl_steps=2),
    DynamicConfig(blocks=4, eviction="lfu"),
    DynamicConfig(blocks=1, eviction="none", ttl_steps=1),
    DynamicConfig(blocks=2, admission_threshold=3, admission_probability=0.7),
    DynamicConfig(blocks=2, admission_threshold=2, eviction="timestamp", ttl_s=60),
    DynamicConfig(blocks=2, admission_threshold=3, counter_capacity=6),
    DynamicConfig(blocks=2, admission_threshold=3, counter_capacity=58, ttl_steps=4),
    DynamicConfig(blocks=2, ttl_steps=4, feature_ttl_steps={"g": 1}),
    DynamicConfig(blocks=2, admission_threshold=2, ttl_s=90, feature_ttl_s={"g": 20}),
)


class Trainer:
    """One rank, whose memory outlives its model."""

    def __init__(self, model: Model, exchange: Any, memory: MemoryHere | None, adopt: bool) -> None:
        options = EngineOptions(share_tables=False, memory=memory, adopt=adopt, track_rows=True)
        parts = model.plan, exchange, model.optimizer, torch.device("cpu"), SEED, options
        self.model, self.rank, self.ranks = model, exchange.rank, exchange.world_size
        self.module, self.engine = shard_embeddings(model.collection("meta"), *parts)

    def output(self, step: list[Bags], time: int) -> Tensor:
        return rows_of(self.model, self.module, step[self.rank], time)

    def step(self, step: list[Bags], time: int) -> None:
        output = self.output(step, time)
        (self.ranks * (output * output).sum() / 8 + output.sum() / 4).backward()

    def content(self) -> dict[str, Tensor]:
        return {
            f"{state.shard} {name}": tensor.detach().clone()
            for state in self.engine.shard_states()
            for name, tensor in state.tensors().items()
        }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def calm(exchange: Any, model: Model, steps: list[list[Bags]]) -> list[dict[str, Tensor]]:
    trainer = Trainer(model, exchange, None, adopt=False)
    seen = [trainer.content()]
    for step, time in zip(steps, TIMES, strict=True):
        trainer.step(step, time)
        seen.append(trainer.content())
    return seen


def shaken(
    exchange: Any, model: Model, steps: list[list[Bags]], wanted: list[dict[str, Tensor]], seed: int
) -> int:
    """Train, and go back at random moments, also between a look-up and its gradient."""
    moments, memory = random.Random(seed), MemoryHere()
    trainer, done, point, backs = Trainer(model, exchange, memory, adopt=False), 0, 0, 0
    trainer.engine.undo.sync(Point(1, 0), b"0")
    clocks = {0: trainer.engine.id_clocks}
    while done < len(steps) or backs < 3:
        if done < len(steps) and moments.random() < 0.7:
            trainer.step(steps[done], TIMES[done])
            done += 1
            clocks[done] = trainer.engine.id_clocks
            if moments.random() < 0.4:
                point = done
                trainer.engine.undo.sync(Point(1, done), str(done).encode())
            continue
        if done < len(steps) and moments.random() < 0.5:
            trainer.output(
                steps[done], TIMES[done]
            )  # it has admitted and evicted when it is stopped
        if moments.random() < 0.5:
            trainer = Trainer(model, exchange, memory, adopt=True)
        assert trainer.engine.undo.go_back(Point(1, point)) == str(point).encode()
        trainer.engine.id_clocks = clocks[point]
        assert same(trainer.content(), wanted[point]), f"back to {point} from {done}"
        done, backs = point, backs + 1
    assert same(trainer.content(), wanted[len(steps)])
    return backs


@pytest.mark.seeds(range(60))
def test_going_back_and_on_ends_as_if_nothing_had_happened(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 3)
    model = random_model(rng, ranks, (rng.choice(RULES), rng.choice(RULES)), ROWS)
    ids = [rng.randrange(-(2**63), 2**63) for _ in range(40)]
    steps = random_steps(rng, ranks, ids, STEPS)
    world = SimulatedWorld(ranks)
    wanted = world.run(lambda exchange: calm(exchange, model, steps))
    world = SimulatedWorld(ranks)
    found = world.run(lambda e: shaken(e, model, steps, wanted[e.rank], seed))
    assert min(found) >= 3
