"""The order of samples: which rows form global batch t, and which of them a rank takes.

DEFINITION. A data set is a list of chunks (Parquet row groups, Arrow record batches), permuted by
(seed, epoch) when shuffling. Laid end to end they hold N rows, cut contiguously into S streams;
stream s has (N + S - 1 - s) // S rows. Inside a stream, rows are shuffled within consecutive blocks
of `shuffle_rows` by a permutation of (seed, epoch, stream, block). Global position k is row k // S
of stream k % S. Global batch t holds positions [t*G, min((t + 1)*G, N)). Sorted by (stream, index),
its n positions are cut evenly: rank r of W takes [r*n // W, (r + 1)*n // W). So batch t is the same
set of rows for every W; a rank reads nearly only N / W rows (use at least as many streams as
ranks); the number of batches follows from metadata, so ranks agree on the end without talking; and
any batch is found directly. Costs nothing per row but the block permutations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayrec.data.hashing import mix_int, permutation
from rayrec.errors import ConfigError

# what a derived seed is for, so that the two uses never share a random stream
_CHUNKS, _BLOCK = 1, 2


class StreamRange(NamedTuple):
    """Rows [start, stop) of one stream, counted in the stream's shuffled order."""

    stream: int
    start: int
    stop: int


class ChunkRange(NamedTuple):
    """Rows [start, stop) of chunk number `chunk`, counted in the data set's own order."""

    chunk: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of one epoch's samples; a pure function of its fields.

    Attributes:
        chunk_rows: rows of each chunk, in the order of the files.
        num_streams: S, part of the data's meaning: another S is another order.
        shuffle_rows: rows per shuffled block; also what a stream keeps in memory.
        shuffle: False leaves chunks and rows in file order (streams still interleave).
    Raises:
        ConfigError: a size is not positive or the epoch is negative.
    """

    chunk_rows: tuple[int, ...]
    num_streams: int = 8
    shuffle_rows: int = 8192
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    chunk_order: tuple[int, ...] = field(init=False, compare=False, repr=False)
    _chunk_starts: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_streams", "shuffle_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be at least 1.")
        if self.epoch < 0:
            raise ConfigError(f"epoch={self.epoch}; epochs count from 0.")
        order = list(range(len(self.chunk_rows)))
        if self.shuffle:
            order = permutation(mix_int(_CHUNKS, self.seed, self.epoch), len(order)).tolist()
        starts = accumulate([self.chunk_rows[c] for c in order], initial=0)
        object.__setattr__(self, "chunk_order", tuple(order))
        object.__setattr__(self, "_chunk_starts", tuple(starts))

    @property
    def num_rows(self) -> int:
        """N, rows of the data set."""
        return self._chunk_starts[-1]

    def stream_rows(self, stream: int) -> int:
        """Rows of one stream; they differ by at most one."""
        return (self.num_rows + self.num_streams - 1 - stream) // self.num_streams

    def stream_start(self, stream: int) -> int:
        """Rows of all streams before this one."""
        size, longer = divmod(self.num_rows, self.num_streams)
        return stream * size + min(stream, longer)

    def num_blocks(self, stream: int) -> int:
        """Shuffled blocks of one stream."""
        return -(-self.stream_rows(stream) // self.shuffle_rows)

    def block_rows(self, stream: int, block: int) -> int:
        """Rows of one block; only a stream's last is shorter than `shuffle_rows`."""
        return min(self.shuffle_rows, self.stream_rows(stream) - block * self.shuffle_rows)

    def block_permutation(self, stream: int, block: int) -> NDArray[np.int64] | None:
        """(rows of the block,) the row in file order that comes i-th; None when not shuffling."""
        if not self.shuffle:
            return None
        key = mix_int(_BLOCK, self.seed, self.epoch, stream, block)
        return permutation(key, self.block_rows(stream, block))

    def block_chunks(self, stream: int, block: int) -> Iterator[ChunkRange]:
        """The parts of chunks that hold one block, in order.

        A range counts rows inside its chunk; together the ranges have `block_rows` rows.
        """
        start = self.stream_start(stream) + block * self.shuffle_rows
        stop = start + self.block_rows(stream, block)
        at = bisect_right(self._chunk_starts, start) - 1
        while start < stop:
            first, end = self._chunk_starts[at], min(self._chunk_starts[at + 1], stop)
            # A chunk may have no rows; it is passed over.
            if end > start:
                yield ChunkRange(self.chunk_order[at], start - first, end - first)
            start, at = max(start, end), at + 1

    def num_batches(self, global_batch_size: int, drop_last: bool = False) -> int:
        """Global batches of an epoch; the last may be short unless it is dropped."""
        return count_batches(self.num_rows, global_batch_size, drop_last)

    def batch_rows(self, batch: int, global_batch_size: int) -> int:
        """Rows of global batch `batch`, over all ranks."""
        return max(0, min(global_batch_size, self.num_rows - batch * global_batch_size))

    def rank_ranges(
        self, batch: int, global_batch_size: int, rank: int, num_ranks: int
    ) -> list[StreamRange]:
        """The rows of a global batch that one rank takes, by stream.

        The list is empty where the batch has fewer rows than ranks.
        """
        # sorted by (stream, index), positions [low, high) of the batch's n are this rank's
        first, n = batch * global_batch_size, self.batch_rows(batch, global_batch_size)
        low, high = rank * n // num_ranks, (rank + 1) * n // num_ranks
        out, seen = [], 0
        for s in range(self.num_streams):
            # positions i*S + s within [first, first + n)  <=>  i within [start, stop)
            start, stop = -((s - first) // self.num_streams), -((s - first - n) // self.num_streams)
            a, b = max(low - seen, 0), min(high - seen, stop - start)
            if a < b:
                out.append(StreamRange(s, start + a, start + b))
            seen += stop - start
        return out


def count_batches(num_rows: int, global_batch_size: int, drop_last: bool) -> int:
    """ceil(num_rows / global_batch_size), or the floor when a short last batch is dropped.

    Raises:
        ConfigError: the batch size is not positive.
    """
    if global_batch_size < 1:
        raise ConfigError(f"global_batch_size={global_batch_size}; it must be at least 1.")
    return num_rows // global_batch_size if drop_last else -(-num_rows // global_batch_size)
