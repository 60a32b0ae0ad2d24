"""The log of one kernel: rows come back bit for bit, also after a kill amid an entry."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rayrec.layout import Shard
from rayrec.shards import undo_log
from rayrec.shards.state import ShardState
from rayrec.shards.touched import RowStamps, TouchClock
from rayrec.shards.undo import Point, RankUndo
from rayrec.shards.undo_log import UndoLog, _place
from tests.memory import MemoryHere


class Kernel:
    """Shards in memories of any arrangement, with a log on `memory`."""

    def __init__(self, memory: MemoryHere, clock: TouchClock, widths: list[int], seed: int) -> None:
        draw, self.iteration = random.Random(seed), 0
        rows = [draw.randrange(0, 9000) for _ in widths]
        flat = torch.zeros(sum(n * w for n, w in zip(rows, widths, strict=True)) + 64)
        flat.normal_(generator=torch.Generator().manual_seed(seed))
        per_row, at = torch.rand(sum(rows) + 5), draw.choice([0, 32])
        self.states = []
        for i, (n, width) in enumerate(zip(rows, widths, strict=True)):
            shard = Shard(f"t{i}", range(7, 7 + n), range(width), 0)
            state = {"sum": per_row[sum(rows[:i]) + 5 :][:n]}
            if draw.random() < 0.3:
                state["moment"] = torch.rand(n, width).bfloat16()
            rows_of_table = flat[at : at + n * width].view(n, width)
            self.states.append(ShardState(shard, rows_of_table, state))
            at += n * width
        self.undo = UndoLog(self.states, memory)
        stamps = torch.zeros(sum(rows), dtype=torch.int32)
        lanes = range(len(widths))
        shards = [state.shard for state in self.states]
        self.stamps = RowStamps(shards, clock, stamps, lanes, undo=self.undo)

    def content(self) -> list[torch.Tensor]:
        return [t.clone() for state in self.states for t in state.tensors().values()]

    def update(self, draw: random.Random) -> None:
        """Touch some rows of every shard, some of them often, and change them."""
        ids = []
        for state in self.states:
            n = len(state.shard.rows)
            some = [draw.randrange(max(1, n // draw.choice([1, 50]))) for _ in range(n and 2500)]
            ids.append(torch.tensor(some, dtype=torch.int64))
        ends = torch.tensor([0, *(len(i) for i in ids)]).cumsum(0)
        self.stamps.touch(torch.cat(ids), ends)
        self.iteration += 1
        for rows, state in zip(ids, self.states, strict=True):
            for tensor in state.tensors().values():
                tensor[rows] = torch.rand(len(rows), *tensor.shape[1:]).to(tensor.dtype)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("widths", [[8], [16, 16, 16], [8, 12, 8, 20]])
@pytest.mark.parametrize("seed", range(3))
def test_rows_come_back_from_either_of_two_points(widths: list[int], seed: int) -> None:
    draw, memory, clock = random.Random(seed), MemoryHere(), TouchClock()
    kernel = Kernel(memory, clock, widths, seed)
    undo = RankUndo(memory, clock, lambda: [kernel])
    seen = {}
    for step in range(7):
        undo.sync(Point(1, step), bytes([step]) * 5000)
        seen[step] = kernel.content(), kernel.iteration
        for _ in range(draw.randint(1, 4)):
            kernel.update(draw)
        clock.now += draw.choice([0, 1])  # as a save does, which marks for itself
        to = draw.choice([point.step for point in undo.points])
        assert {point.step for point in undo.points} >= {step}
        if draw.random() < 0.7:
            if draw.random() < 0.5:
                # the process that goes back may be another one than the one that trained
                undo = RankUndo(memory, clock, lambda: [kernel])
                kernel.undo = kernel.stamps._undo = UndoLog(kernel.states, memory)
            assert undo.go_back(Point(1, to)) == bytes([to]) * 5000
            assert equal(kernel.content(), seen[to][0]) and kernel.iteration == seen[to][1]


@pytest.mark.parametrize("cut", range(1, 8))
def test_an_entry_that_was_cut_short_does_not_count(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill comes at any copy into the log; the rows it was about have not changed yet."""
    memory, clock, draw = MemoryHere(), TouchClock(), random.Random(cut)
    kernel = Kernel(memory, clock, [8, 8, 24], 3)
    undo = RankUndo(memory, clock, lambda: [kernel])
    undo.sync(Point(1, 0), b"x")
    before = kernel.content()
    copy, copies = torch.index_select, []

    def select(*args, **more):
        copies.append(1)
        if len(copies) == 4 + cut:
            raise KeyboardInterrupt
        return copy(*args, **more)

    monkeypatch.setattr(torch, "index_select", select)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            kernel.update(draw)
    monkeypatch.undo()
    assert not equal(kernel.content(), before) or cut < 4
    kernel.undo = UndoLog(kernel.states, memory)
    RankUndo(memory, clock, lambda: [kernel]).go_back(Point(1, 0))
    assert equal(kernel.content(), before)


def test_going_back_can_be_cut_short_and_done_again() -> None:
    memory, clock, draw = MemoryHere(), TouchClock(), random.Random(5)
    kernel = Kernel(memory, clock, [8, 12], 4)
    undo = RankUndo(memory, clock, lambda: [kernel])
    seen = []
    for step in range(2):
        undo.sync(Point(1, step), b"x")
        seen.append(kernel.content())
        kernel.update(draw)
    # the newer log is put back, and then the process ends
    kernel.undo.put_back([undo._slots.newest])
    assert equal(kernel.content(), seen[1])
    undo.go_back(Point(1, 0))
    assert equal(kernel.content(), seen[0]) and undo.points == (Point(1, 0),)


def test_nothing_can_be_gone_back_to_after_a_change_that_no_log_holds() -> None:
    memory, clock = MemoryHere(), TouchClock()
    kernel = Kernel(memory, clock, [8], 0)
    undo = RankUndo(memory, clock, lambda: [kernel])
    undo.sync(Point(1, 0), b"")
    undo.forget()
    assert undo.points == ()
    undo.sync(Point(1, 1), b"")
    undo.end()
    undo.sync(Point(1, 2), b"")
    assert undo.points == ()


def test_a_change_of_all_rows_is_undone() -> None:
    """Replicas are averaged between two steps."""
    memory, clock, draw = MemoryHere(), TouchClock(), random.Random(1)
    kernel = Kernel(memory, clock, [8, 12], 1)
    undo = RankUndo(memory, clock, lambda: [kernel])
    undo.sync(Point(1, 0), b"")
    before = kernel.content()
    kernel.update(draw)
    undo.log_all()
    for state in kernel.states:
        for tensor in state.tensors().values():
            tensor.mul_(0.5)
    undo.go_back(Point(1, 0))
    assert equal(kernel.content(), before)


def test_entries_lie_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo_log, "_FIRST_ENTRIES", 4)
    monkeypatch.setattr(undo_log, "_DOUBLINGS", 3)
    places = [_place(entry) for entry in range(4 * (1 + 2 + 4 + 8 + 8 + 8))]
    sizes = np.bincount([chunk for chunk, _ in places])
    assert sizes.tolist() == [4, 8, 16, 32, 32, 32]
    expected = [(chunk, at) for chunk, size in enumerate(sizes) for at in range(size)]
    assert places == expected
