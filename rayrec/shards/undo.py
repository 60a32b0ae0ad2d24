"""Sync points of one rank: moments of training to which all that it holds can be put back.

At a sync point the logs of the rows begin anew, and the small rest (dense layers, place in the
data, counters) is kept as bytes. The last two points are kept. All that is needed lies in one
`Memory`: a process that maps it after another was killed puts back what that one had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rayrec.shards.named_memory import Memory
from rayrec.shards.touched import RowStamps, TouchClock
from rayrec.shards.undo_log import UndoLog

_NEWEST, _FIRST_SLOT, _SLOT_WORDS = 0, 8, 8
_VALID, _LINE, _STEP, _BYTES = range(4)
_PAGE = 8 * (_FIRST_SLOT + 2 * _SLOT_WORDS)
_LEAST_BYTES = 1 << 12


class Point(NamedTuple):
    """A sync point.

    Attributes:
        line: a number of the run's past: points of one step are the same only with the same line.
        step: global steps done.
    """

    line: int
    step: int


class UndoKernel(Protocol):
    """A kernel whose updates a sync point can undo.

    Attributes:
        iteration: updates so far.
        undo, stamps: its log, and its stamps; None where nothing can be undone.
    """

    iteration: int
    undo: UndoLog | None
    stamps: RowStamps | None


class Slots:
    """The sync points that a memory holds, with the bytes of each; at most two."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._words = memory.take("points", _PAGE).view(torch.int64)

    def _slot(self, turn: int) -> Tensor:
        first = _FIRST_SLOT + turn * _SLOT_WORDS
        return self._words[first : first + _SLOT_WORDS]

    @property
    def newest(self) -> int:
        """The slot of the newest point."""
        return int(self._words[_NEWEST])

    def points(self) -> dict[Point, int]:
        """Return the points, each with its slot."""
        points = {}
        for turn in (0, 1):
            slot = self._slot(turn)
            if slot[_VALID]:
                points[Point(int(slot[_LINE]), int(slot[_STEP]))] = turn
        return points

    def drop(self, turn: int) -> None:
        """Keep a point no more."""
        self._slot(turn)[_VALID] = 0

    def fill(self, turn: int, small: bytes) -> None:
        """Write the bytes of a point that does not count yet."""
        size = max(_LEAST_BYTES, 1 << (len(small) - 1).bit_length())
        piece = self._memory.take(f"small{turn}", size)
        piece.numpy()[: len(small)] = np.frombuffer(small or b"\0", np.uint8)[: len(small)]
        self._slot(turn)[_BYTES] = len(small)

    def count(self, turn: int, point: Point) -> None:
        """Have a point count, as the newest."""
        slot = self._slot(turn)
        slot[_LINE], slot[_STEP] = point.line, point.step
        # The point counts from here on, and its log is the one that rows are added to.
        slot[_VALID] = 1
        self._words[_NEWEST] = turn

    def only(self, turn: int) -> None:
        """Keep one point alone, as the newest."""
        self.drop(1 - turn)
        self._words[_NEWEST] = turn

    def small(self, turn: int) -> bytes:
        """Return the bytes of a point."""
        length = int(self._slot(turn)[_BYTES])
        size = max(_LEAST_BYTES, 1 << (length - 1).bit_length())
        return self._memory.take(f"small{turn}", size)[:length].numpy().tobytes()


class RankUndo:
    """Sets sync points on one rank, and goes back to them.

    What is written to rows from outside of training, through `shard_states()`, is not undone: call
    `forget` before.

    Args:
        memory: memory of this rank; the logs of its kernels lie there, too.
        clock: the clock of the stamps of touched rows.
        kernels: returns the kernels of the rank as they are now.
    """

    def __init__(
        self, memory: Memory, clock: TouchClock, kernels: Callable[[], Iterable[UndoKernel]]
    ) -> None:
        self._slots, self._clock, self._kernels = Slots(memory), clock, kernels
        self._ended = False

    @property
    def points(self) -> tuple[Point, ...]:
        """The points that this rank can go back to."""
        return tuple(self._slots.points())

    def sync(self, point: Point, small: bytes) -> None:
        """Set a sync point between two steps; the one before it is kept, an older one is not.

        All ranks have set the one before when any sets this one: a collective lies between.

        Args:
            small: bytes that `go_back` returns.
        """
        if self._ended:
            return
        turn = 1 - self._slots.newest
        self._slots.drop(turn)
        self._slots.fill(turn, small)
        self._begin(turn)
        self._slots.count(turn, point)

    def go_back(self, point: Point) -> bytes:
        """Put all rows, their optimizer state and the counters of updates back to a sync point.

        Every other point is forgotten. It can be done again where it was cut short.

        Returns:
            The bytes that were given to `sync`.
        """
        turn, newest = self._slots.points()[point], self._slots.newest
        turns = [turn] if turn == newest else [newest, turn]
        for kernel in self._kernels():
            if kernel.undo is not None:
                kernel.iteration = kernel.undo.put_back(turns)
        # Rows are those of the point now, and so its log may begin anew.
        self._slots.only(turn)
        self._begin(turn)
        return self._slots.small(turn)

    def _begin(self, turn: int) -> None:
        mark = self._clock.now
        self._clock.now += 1
        for kernel in self._kernels():
            if kernel.undo is not None and kernel.stamps is not None:
                kernel.undo.begin(turn, kernel.iteration)
                kernel.stamps.log_since(mark)

    def log_all(self) -> None:
        """Log all rows, since something else than a step is about to change them."""
        for kernel in self._kernels():
            if kernel.stamps is not None:
                kernel.stamps.log_all()

    def end(self) -> None:
        """Keep no point and take none any more: the kernels are about to be others."""
        self.forget()
        self._ended = True

    def forget(self) -> None:
        """Keep no point, since rows are about to change in a way that no log holds."""
        for turn in (0, 1):
            self._slots.drop(turn)


def common_point(points: Sequence[Collection[Point]], not_before: int = 0) -> Point | None:
    """Return the newest point that all ranks have, or None.

    Args:
        points: points of each rank.
        not_before: points of earlier steps do not count.
    """
    common = set(points[0]).intersection(*points[1:])
    late = [point for point in common if point.step >= not_before]
    return max(late, key=lambda point: point.step, default=None)
