"""The rows of one kernel as they were at a sync point: those that training has touched since then.

Before a kernel updates its rows, those that it touches for the first time since the sync point are
copied here, weights and optimizer state. Two logs take turns: a rank may be past a sync point that
another has not come to, so that both go back to the one before.

A process may be killed at any instruction. So an entry is written first, then it is counted, and
only then are the rows updated. Putting rows back changes nothing in the log, so it can be done
again. A log grows by chunks, of doubling size at first, and keeps them.
"""

# n rows, D columns

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rayrec.shards.named_memory import Memory
from rayrec.shards.state import ShardState

_HEAD = 64  # bytes before the entries of a log: two words, and the rest of a cache line
_FIRST_ENTRIES = 1 << 10
_DOUBLINGS = 8
_COUNT, _ITERATION = 0, 1


@dataclass(frozen=True)
class _Column:
    """One tensor of some shards that lie in one memory.

    Attributes:
        base: (rows, D), or (rows,) of row-wise state, with the rows of all of them; strided where
            several columns share the memory.
        moves: per shard, what makes a row of `base` of a row number of the kernel.
    """

    base: Tensor
    moves: tuple[int, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor], starts: Sequence[int]) -> _Column:
        width, step = _width(tensors[0]), _step(tensors[0])
        offsets = [tensor.storage_offset() for tensor in tensors]
        first = min(offsets)
        ends = [at + step * len(tensor) for at, tensor in zip(offsets, tensors, strict=True)]
        rows = (max(ends) - first) // step
        flat = tensors[0].detach()
        if flat.dim() == 2:
            base = flat.as_strided((rows, width), (step, 1), first)
        else:
            base = flat.as_strided((rows,), (step,), first)
        places = zip(offsets, starts, strict=True)
        return _Column(base, tuple((at - first) // step - start for at, start in places))

    @property
    def row_bytes(self) -> int:
        return _width(self.base) * self.base.element_size()

    def rows(self, rows_n: Tensor, shards_n: Tensor | None) -> Tensor:
        """Return (n,) rows of `base`."""
        if shards_n is None:
            return rows_n + self.moves[0] if self.moves[0] else rows_n
        return rows_n + torch.tensor(self.moves)[shards_n]


class _Chunk:
    """A part of a log: row numbers, and beside them the old values of every column."""

    def __init__(self, memory: Memory, name: str, entries: int, columns: Sequence[_Column]) -> None:
        sizes = [8 * entries, *(entries * column.row_bytes for column in columns)]
        # every part begins at a multiple of 64 bytes
        begins = list(accumulate((-(-size // _HEAD) * _HEAD for size in sizes), initial=_HEAD))
        whole = memory.take(name, begins[-1])
        self.words = whole[:_HEAD].view(torch.int64)
        parts = [whole[at : at + size] for at, size in zip(begins, sizes, strict=False)]
        self.rows_n = parts[0].view(torch.int64)
        self.values = []
        for part, column in zip(parts[1:], columns, strict=True):
            shape = (entries, *column.base.shape[1:])
            self.values.append(part.view(column.base.dtype).view(shape))


class _Band:
    """Shards of one kernel that lie alike, so that one copy takes rows of all of them.

    Args:
        states: states of these shards. starts: the first row of each among those of the kernel.
    """

    def __init__(
        self, states: Sequence[ShardState], starts: Sequence[int], memory: Memory, name: str
    ) -> None:
        self._memory, self._name = memory, name
        self._columns = []
        for column in states[0].tensors():
            tensors = [state.tensors()[column] for state in states]
            self._columns.append(_Column.of(tensors, starts))
        alike = all(len(set(column.moves)) == 1 for column in self._columns)
        self._starts = None if alike else torch.tensor(list(starts))
        self._chunks: tuple[list[_Chunk], list[_Chunk]] = ([], [])

    def _shards(self, rows_n: Tensor) -> Tensor | None:
        if self._starts is None:
            return None
        return torch.bucketize(rows_n, self._starts, right=True) - 1

    def _chunk(self, turn: int, number: int) -> _Chunk:
        chunks = self._chunks[turn]
        while len(chunks) <= number:
            name = f"{self._name}.{turn}.{len(chunks)}"
            entries = _FIRST_ENTRIES << min(len(chunks), _DOUBLINGS)
            chunks.append(_Chunk(self._memory, name, entries, self._columns))
        return chunks[number]

    def words(self, turn: int) -> Tensor:
        """Return the words of a log: its entries, and updates of the kernel when it began."""
        return self._chunk(turn, 0).words

    def add(self, turn: int, rows_n: Tensor) -> None:
        """Copy rows as they are now, then count them."""
        words = self.words(turn)
        count, added = int(words[_COUNT]), 0
        shards_n = self._shards(rows_n)
        places = [column.rows(rows_n, shards_n) for column in self._columns]
        while added < rows_n.numel():
            number, at = _place(count + added)
            chunk = self._chunk(turn, number)
            size = min(chunk.rows_n.numel() - at, rows_n.numel() - added)
            new, into = slice(added, added + size), slice(at, at + size)
            chunk.rows_n[into] = rows_n[new]
            for column, rows, values in zip(self._columns, places, chunk.values, strict=True):
                torch.index_select(column.base, 0, rows[new], out=values[into])
            added += size
        # Only what is counted is put back, so the count comes last.
        words[_COUNT] = count + added

    def put_back(self, turn: int) -> None:
        """Write the logged values to their rows."""
        left, number = int(self.words(turn)[_COUNT]), 0
        while left:
            chunk = self._chunk(turn, number)
            size = min(left, chunk.rows_n.numel())
            rows_n = chunk.rows_n[:size]
            shards_n = self._shards(rows_n)
            for column, values in zip(self._columns, chunk.values, strict=True):
                column.base.index_copy_(0, column.rows(rows_n, shards_n), values[:size])
            left -= size
            number += 1


class UndoLog:
    """The two logs of one kernel.

    Args:
        states: live rows and optimizer state of its shards, on the CPU.
        memory: memory of the logs.
    """

    def __init__(self, states: Sequence[ShardState], memory: Memory) -> None:
        starts = list(accumulate((len(state.shard.rows) for state in states), initial=0))
        alike: dict[object, list[int]] = {}
        for i, state in enumerate(states):
            if len(state.shard.rows):
                alike.setdefault(_lies(state.tensors()), []).append(i)
        self._bands = []
        # the number of each shard's band
        self._band_of = torch.zeros(len(states), dtype=torch.int64)
        for number, (_, shards) in enumerate(alike.items()):
            some = [states[i] for i in shards]
            self._bands.append(_Band(some, [starts[i] for i in shards], memory, f"log{number}"))
            self._band_of[shards] = number
        self._starts = torch.tensor(starts[:-1])
        self._turn = 0

    def add(self, rows_n: Tensor) -> None:
        """Log rows that are about to change for the first time since the sync point.

        Args:
            rows_n: (n,) int64, each once; the rows of all shards are numbered one after the other.
        """
        if len(self._bands) == 1:
            self._bands[0].add(self._turn, rows_n)
            return
        bands_n = self._band_of[torch.bucketize(rows_n, self._starts, right=True) - 1]
        for number, band in enumerate(self._bands):
            mine = rows_n[bands_n == number]
            if mine.numel():
                band.add(self._turn, mine)

    def begin(self, turn: int, iteration: int) -> None:
        """Begin a log anew, at a sync point; rows are added to it from now on.

        Args:
            turn: 0 or 1, which of the logs.
            iteration: updates that the kernel has made.
        """
        self._turn = turn
        for band in self._bands:
            words = band.words(turn)
            words[_COUNT] = 0
            words[_ITERATION] = iteration

    def put_back(self, turns: Sequence[int]) -> int:
        """Put rows back as they were when the last of some logs began.

        Args:
            turns: the newest first.
        Returns:
            the updates that the kernel had made then.
        """
        for turn in turns:
            for band in self._bands:
                band.put_back(turn)
        return int(self._bands[0].words(turns[-1])[_ITERATION]) if self._bands else 0


def _width(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.dim() == 2 else 1


def _step(tensor: Tensor) -> int:
    """Return the elements from one row to the next."""
    return _width(tensor) if tensor.dim() == 2 else tensor.stride(0)


def _lies(tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    """Return a key that is equal for shards whose rows can be copied together."""
    lies: list[object] = []
    for name, tensor in tensors.items():
        storage, step = tensor.untyped_storage().data_ptr(), _step(tensor)
        assert tensor.dim() == 1 or tensor.is_contiguous(), "the rows of a shard lie side by side"
        lies += [name, storage, step, tensor.storage_offset() % step, tensor.dtype]
    return tuple(lies)


def _place(entry: int) -> tuple[int, int]:
    """Return the chunk of an entry, and its place there."""
    number = (entry // _FIRST_ENTRIES + 1).bit_length() - 1
    if number <= _DOUBLINGS:
        return number, entry - _FIRST_ENTRIES * ((1 << number) - 1)
    # All chunks from here on have as many entries as the last that was doubled.
    before = _FIRST_ENTRIES * ((1 << _DOUBLINGS) - 1)
    more, at = divmod(entry - before, _FIRST_ENTRIES << _DOUBLINGS)
    return _DOUBLINGS + more, at
