"""Shards that pass from one world of ranks to another: the rows are those of the tables, bit for
bit, and nothing travels that is there already.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from rayrec.comm.simulated import SimulatedWorld
from rayrec.distributed import passing
from rayrec.distributed.passing import columns_of, pass_on, passages
from rayrec.layout import ShardingPlan
from rayrec.shards.overlap import fill
from rayrec.shards.state import ShardState
from tests.unit.checkpoint_worlds import Ranks, Truth, random_plan, random_truths, shard_states


class Change(NamedTuple):
    """Two worlds that meet: which ranks of the joint world hold and take, under which plans."""

    truths: list[Truth]
    old: ShardingPlan
    new: ShardingPlan
    holders: list[int | None]
    takers: list[int | None]


def a_change(seed: int) -> Change:
    """Up to four ranks before and after, some of them the same; groups of replicas, too."""
    rng = random.Random(seed)
    truths = random_truths(rng)
    sizes = [rng.randint(1, 4) for _ in range(2)]
    groups = [rng.choice([n for n in range(1, size + 1) if size % n == 0]) for size in sizes]
    (before, after), (old_group, new_group) = sizes, groups
    leaving = rng.randint(max(0, before - after), before)
    joint = after + leaving
    there = rng.sample(range(after), before - leaving) + list(range(after, joint))
    rng.shuffle(there)
    holders: list[int | None] = [None] * joint
    for old_rank, rank in enumerate(there):
        holders[rank] = old_rank % old_group
    takers = [rank % new_group if rank < after else None for rank in range(joint)]
    old, new = (random_plan(rng, truths, group) for group in groups)
    return Change(truths, old, new, holders, takers)


def filled(new: list[ShardState], pieces: list[ShardState]) -> list[ShardState]:
    fill(new, pieces)
    return new


@pytest.mark.seeds(range(60))
def test_new_ranks_get_what_old_ranks_hold(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    change = a_change(seed)
    monkeypatch.setattr(passing, "ROUND_BYTES", random.Random(seed).choice([64, 1000, 1 << 20]))
    truths, old, new, holders, takers = change
    ranks = Ranks(len(holders))
    world = SimulatedWorld(len(holders))
    exchanges = world.run(lambda exchange: exchange)

    def body(rank: int, gather):
        holder, taker = holders[rank], takers[rank]
        states = [] if holder is None else shard_states(truths, old, holder)
        tables = columns_of(states, gather)
        pieces, sent = pass_on(old, new, holders, takers, states, exchanges[rank], tables)
        if taker is None:
            assert not pieces
            return sent, [], []
        wanted = shard_states(truths, new, taker, fill=True)
        everything = [s for r in range(old.world_size) for s in shard_states(truths, old, r)]
        by_place = {(s.shard.table, s.shard.rows, s.shard.cols): s for s in everything}
        direct = filled(shard_states(truths, new, taker, fill=True), list(by_place.values()))
        return sent, filled(wanted, pieces), direct

    told = ranks.run(body).all()
    for _, wanted, direct in told:
        for got, expected in zip(wanted, direct, strict=True):
            truth = next(t for t in truths if t.config.name == got.shard.table)
            assert torch.equal(got.weight, truth.shard_state(got.shard, fill=False).weight)
            for name, state in got.optimizer.items():
                torch.testing.assert_close(state, expected.optimizer[name])
                assert truth.state == "row" or torch.equal(state, expected.optimizer[name])
    sent_bytes = sum(sent for sent, *_ in told)
    assert sent_bytes == world.sent_bytes


@pytest.mark.seeds(range(60))
def test_only_what_a_rank_lacks_travels_and_once(seed: int) -> None:
    truths, old, new, holders, takers = a_change(seed)
    for truth in truths:
        table = truth.config.name
        told = list(passages(table, old, new, holders, takers))
        for rank, taker in enumerate(takers):
            cells = torch.zeros(truth.weight.shape, dtype=torch.int32)
            lacks = torch.zeros(truth.weight.shape, dtype=torch.bool)
            for shard in new.tables[table].layout.shards(table):
                if taker is not None and shard.rank == taker:
                    rows, cols = shard.rows, shard.cols
                    lacks[rows.start : rows.stop, cols.start : cols.stop] = True
            wanted = lacks.clone()
            for shard in old.tables[table].layout.shards(table):
                if holders[rank] is not None and shard.rank == holders[rank]:
                    rows, cols = shard.rows, shard.cols
                    lacks[rows.start : rows.stop, cols.start : cols.stop] = False
            for passage in told:
                rows, cols = passage.piece.rows, passage.piece.cols
                if passage.target == rank:
                    cells[rows.start : rows.stop, cols.start : cols.stop] += 1
                    travels = passage.source != rank
                    part = lacks[rows.start : rows.stop, cols.start : cols.stop]
                    assert bool(part.all() if travels else not part.any())
                    assert holders[passage.source] == passage.held.rank
            assert torch.equal(cells, wanted.int())
