"""Sync points, undo and redo over random plans: what is put back is what was there, bit for bit.

A world trains, sets sync points, goes back to them and trains on, in the same model or in a new one
on the memory that the former left behind, as after a kill. It ends as a world that never went back.
"""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.shards.undo import Point
from tests.draws import draw
from tests.memory import MemoryHere
from tests.simulation import SimulatedWorld, batches_of, sharded_world, targets_of, train_step
from tests.worlds import World

STEPS = 4


def content(engine) -> list:
    """A copy of all rows and optimizer state of a rank, and its kernels' counts of updates."""
    tensors = []
    for state in engine.shard_states():
        tensors += [tensor.detach().clone() for tensor in state.tensors().values()]
    return [*tensors, *(torch.tensor(k.iteration) for k in engine.lookups.values())]


def same(one: list, other: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Trainer:
    """One rank of a world, whose memory outlives its model."""

    def __init__(self, world: World, exchange, memory: MemoryHere | None, adopt=False) -> None:
        share = world.seed % 2 == 0
        options = EngineOptions(share_tables=share, memory=memory, adopt=adopt, track_rows=True)
        self.rank = exchange.rank
        self.modules, self.engine = sharded_world(world, exchange, options, "cpu")

    def step(self, batches, targets, number: int) -> None:
        train_step(self.modules, batches[number][self.rank], targets[number][self.rank])


def undisturbed(world: World, batches, targets) -> list[list[list]]:
    """Per rank and number of steps done, the content."""

    def rank_main(exchange):
        trainer = Trainer(world, exchange, None)
        seen = [content(trainer.engine)]
        for number in range(STEPS):
            trainer.step(batches, targets, number)
            seen.append(content(trainer.engine))
        return seen

    torch.manual_seed(world.seed)
    return SimulatedWorld(world.world_size).run(rank_main)


def shaken(world: World, batches, targets, expected, seed: int):
    """Train with sync points, and go back at random moments; per rank what came of it."""

    def rank_main(exchange):
        # all ranks draw the same moments
        moments = random.Random(seed)
        own = expected[exchange.rank]
        memory = MemoryHere()
        trainer = Trainer(world, exchange, memory)
        trainer.engine.undo.sync(Point(seed, 0), b"0")
        points, done, backs = [0], 0, 0
        while done < STEPS or backs < 1:
            if done < STEPS:
                trainer.step(batches, targets, done)
                done += 1
                if moments.random() < 0.5:
                    # Some ranks may fail before they come to a point that others have set.
                    late = moments.choice([None, None, *range(exchange.world_size)])
                    if late != exchange.rank:
                        trainer.engine.undo.sync(Point(seed, done), str(done).encode() * 999)
                    points = [*points, done][-2:] if late is None else points[-1:]
                    if late is None:
                        continue
                elif moments.random() < 0.6:
                    continue
            to = moments.choice(points)
            if moments.random() < 0.5:
                trainer = Trainer(world, exchange, memory, adopt=True)
            assert Point(seed, to) in trainer.engine.undo.points
            small = trainer.engine.undo.go_back(Point(seed, to))
            assert small == (b"0" if not to else str(to).encode() * 999)
            assert trainer.engine.undo.points == (Point(seed, to),)
            assert same(content(trainer.engine), own[to]), f"back to {to} from {done}"
            points, done, backs = [to], to, backs + 1
        return same(content(trainer.engine), own[STEPS]), backs

    torch.manual_seed(world.seed)
    return SimulatedWorld(world.world_size).run(rank_main)


def check(seed: int) -> None:
    drawn = draw(seed)
    world = drawn.world
    world.optimizer = drawn.optimizers  # type: ignore[assignment]  # one per table
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    expected = undisturbed(world, batches, targets)
    for equal, backs in shaken(world, batches, targets, expected, seed):
        assert equal and backs


@pytest.mark.seeds(range(30))
def test_going_back_and_on_ends_as_if_nothing_had_happened(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.seeds(range(30, 230))
def test_going_back_and_on_in_many_more_worlds(seed: int) -> None:
    check(seed)
