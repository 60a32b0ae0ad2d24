"""Rows of a rank's shards that training has touched since a mark.

Each row has a stamp of 32 bits: the time of a clock when the row was last updated. A mark reads the
clock and sets it forward, so a row was touched since the mark where its stamp is later. Any number
of readers may hold marks of their own: checkpoints now, deltas for servers later.

Writing costs 4 bytes per id of a step, at random places, and no host sync. Reading costs one pass
over the stamps. A rank that can undo steps (`undo`) learns here, too, which rows a step touches for
the first time since its sync point. Nothing is kept where a model is not asked for it. A bitmap
would take a 32nd of the memory, but only one reader could clear it, and setting bits is slower
(docs/log.md).
"""

# S lanes of a kernel, N ids

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.layout.geometry import Shard
from rayrec.shards.undo_log import UndoLog


class TouchClock:
    """The time that stamps are written with, the same on every rank.

    Attributes:
        now: 1 or more; a stamp of 0 means that the row was never touched.
    """

    def __init__(self) -> None:
        self.now = 1


class RowStamps:
    """The stamps of the shards of one kernel.

    Args:
        shards: shards of the kernel, in the order of their stamps.
        clock: tells the time.
        stamps: (rows of all shards,) int32 zeros, on the device of the rows and of the ids.
        lanes: per lane of the ids of a pooled group, the index of its shard, or None for a lane
            that never has ids.
        bases: for a sequence group, the row of its memory where each shard begins.
        undo: log of the rows that are about to change for the first time since a sync point; on the
            CPU only.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        clock: TouchClock,
        stamps: Tensor,
        lanes: Sequence[int | None] = (),
        bases: Sequence[int] = (),
        undo: UndoLog | None = None,
    ) -> None:
        self.shards, self._clock, self.stamps = tuple(shards), clock, stamps
        self._undo, self._logged_since = undo, 0
        device = stamps.device
        self._starts = [0]
        for shard in shards:
            self._starts.append(self._starts[-1] + len(shard.rows))
        self._lanes = tuple(lanes)
        self._lane_views: list[Any] | None = None
        self._firsts_S = torch.tensor(
            [0 if lane is None else self._starts[lane] for lane in lanes], device=device
        )
        self._bases = tuple(bases)
        # The shards of a sequence group lie anywhere in its memory, so they are found by row.
        order = sorted(range(len(bases)), key=lambda i: bases[i])
        self._bounds = torch.tensor([bases[i] for i in order][1:], dtype=torch.int64, device=device)
        self._moves = torch.tensor(
            [self._starts[i] - bases[i] for i in order], dtype=torch.int64, device=device
        )

    def touch(self, ids: Tensor, offsets: Tensor) -> None:
        """Stamp the rows that a kernel is about to update in one step.

        Args:
            ids: (N,) int64 of all lanes, lane by lane, local to the shards; of a sequence group
                rows of its memory.
            offsets: (S * bags + 1,) int64 of pooled ids; not read for a sequence group.
        """
        if self._bases:
            self._write(ids + self._moves[torch.bucketize(ids, self._bounds, right=True)])
            return
        bags = (offsets.numel() - 1) // len(self._lanes)
        if not bags:
            return
        bounds_S = offsets[::bags]
        if ids.device.type != "cpu":
            first_N = self._firsts_S.repeat_interleave(bounds_S.diff(), output_size=ids.numel())
            self._write(ids + first_N)
            return
        # On CPU no temporary of N ids is made: each lane writes where its shard's stamps lie.
        bounds, rows_N, now = bounds_S.tolist(), ids.numpy(), self._clock.now
        if self._undo is not None:
            self._log_lanes(self._undo, bounds, rows_N)
            return
        for stamps, (start, end) in zip(self._views(), pairwise(bounds), strict=True):
            if end > start:
                stamps[rows_N[start:end]] = now

    def touch_rows(self, shard: int, rows: NDArray[np.int64]) -> None:
        """Stamp rows of a shard of a kernel, which are about to change.

        Args:
            shard: its number in the kernel.
            rows: of the shard.
        """
        self._write(torch.from_numpy(rows + self._starts[shard]).to(self.stamps.device))

    def _log_lanes(self, undo: UndoLog, bounds: Sequence[int], rows_N: Any) -> None:
        """Log and stamp what is touched for the first time in this interval, lane by lane."""
        now = self._clock.now
        fresh = []
        for lane, stamps, (start, end) in zip(
            self._lanes, self._views(), pairwise(bounds), strict=True
        ):
            if lane is not None and end > start:
                rows = rows_N[start:end]
                new = np.flatnonzero(stamps.take(rows) != now)
                if len(new):
                    fresh.append(rows.take(new) + self._starts[lane])
        if fresh:
            self._log(undo, np.concatenate(fresh))

    def _log(self, undo: UndoLog, rows: Any) -> None:
        """Log and stamp rows whose stamp is not of now; some may stand there several times."""
        stamps, now = self.stamps.numpy(), self._clock.now
        old = stamps.take(rows)
        # Every entry leaves its own number at its row. The one that stays there keeps the row.
        numbers = np.arange(-len(rows), 0, dtype=stamps.dtype)
        stamps[rows] = numbers
        first = stamps.take(rows) == numbers
        # Another mark than that of the sync point may have moved the clock since.
        logged = rows[first & (old <= self._logged_since)]
        if len(logged):
            undo.add(torch.from_numpy(logged))
        stamps[rows] = now

    def log_since(self, mark: int) -> None:
        """Log the rows that are touched after a mark, of a sync point."""
        self._logged_since = mark

    def log_all(self) -> None:
        """Log and stamp all rows, before something else than a step changes them."""
        if self._undo is not None:
            left = (self.stamps <= self._logged_since).nonzero().view(-1)
            self._undo.add(left)
            self.stamps.fill_(self._clock.now)

    def _write(self, rows_N: Tensor) -> None:
        if self._undo is not None:
            rows = rows_N.numpy()
            fresh = rows[self.stamps.numpy().take(rows) != self._clock.now]
            if len(fresh):
                self._log(self._undo, fresh)
            return
        if rows_N.device.type == "cpu":
            # numpy writes single numbers in half the time of torch's index_fill
            self.stamps.numpy()[rows_N.numpy()] = self._clock.now
        else:
            self.stamps.index_fill_(0, rows_N, self._clock.now)

    def _views(self) -> list[Any]:
        """The stamps of each lane's shard as numpy sees them; a step of 26 lanes has no time."""
        if self._lane_views is None:
            whole = self.stamps.numpy()
            self._lane_views = [
                whole[:0] if lane is None else whole[self._starts[lane] : self._starts[lane + 1]]
                for lane in self._lanes
            ]
        return self._lane_views

    def __getstate__(self) -> dict[str, Any]:
        # a deep copy must not keep views of the original's memory
        return {**self.__dict__, "_lane_views": None}

    def touch_all(self, tables: Collection[str] | None = None) -> None:
        """Stamp every row, or every row of some tables."""
        for i, shard in enumerate(self.shards):
            if tables is None or shard.table in tables:
                self.stamps[self._starts[i] : self._starts[i + 1]] = self._clock.now

    def since(self, mark: int) -> dict[Shard, Tensor]:
        """Per shard, the rows touched since a mark; see `TouchedRows.since`."""
        touched = {}
        for i, shard in enumerate(self.shards):
            later = self.stamps[self._starts[i] : self._starts[i + 1]] > mark
            touched[shard] = later.nonzero().view(-1) + shard.rows.start
        return touched


class TouchedRows:
    """The touched rows of all shards of one rank.

    All ranks mark together, so that the same mark means the same steps everywhere. What is written
    to rows from outside of training, through `shard_states()`, is not seen: call `touch_all`.

    Args:
        clock: the clock of all stamps.
        kernels: returns the stamps of every kernel of the rank as it is now; replicas of a shard
            merge them by their maximum.
    """

    def __init__(self, clock: TouchClock, kernels: Callable[[], Iterable[RowStamps]]) -> None:
        self._clock, self.kernels = clock, kernels

    def mark(self) -> int:
        """Return a mark: `since` of it gives the rows that are touched from now on."""
        self._clock.now += 1
        return self._clock.now - 1

    def since(self, mark: int) -> dict[Shard, Tensor]:
        """Return per shard of this rank the rows touched since a mark.

        Args:
            mark: value that `mark()` gave; 0 gives the rows touched since the model was made.
        Returns:
            (rows,) int64 row numbers of the table, ascending, on the device of the shard.
        """
        touched: dict[Shard, Tensor] = {}
        for kernel in self.kernels():
            touched |= kernel.since(mark)
        return touched

    def touch_all(self, tables: Collection[str] | None = None) -> None:
        """Count every row as touched now, or every row of some tables."""
        for kernel in self.kernels():
            kernel.touch_all(tables)
