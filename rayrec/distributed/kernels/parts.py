"""Cutting a kernel's work into tasks for several threads, by pure functions. The sum of a bag or
of a row's gradient is never cut.

The forward pass is cut into blocks of slots and bags, the update by shards; of a shard that has
more than one thread's share of the work, every task takes the rows of some blocks of rows. A kernel
that is given a part adds up the same numbers in the same order as for the whole, so results are
equal bit for bit. Tasks come with the largest first, so that the threads end together.
"""

# S slots, N ids, T threads

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rayrec.sparse.ops import complete_cumsum

LEAST_VALUES = 1 << 14  # read and written by the kernel; less is not worth waking a thread
# of one task's output, which is still in the core's cache when it is copied to its columns
_CACHED_VALUES = 1 << 17
_TASKS_PER_THREAD = 2
_ROW_BITS = 4  # rows that go to one task together: their row-wise state shares a cache line

P = TypeVar("P")


class Block(NamedTuple):
    """Some bags of neighbouring slots; several slots always have all their bags."""

    slots: range
    bags: range


class RowShare(NamedTuple):
    """Some rows of neighbouring slots: every `parts`-th block of rows, from block `part` on.

    Attributes:
        slots: all slots of some shards, so that no other share touches their rows.
        parts: a power of two; 1 for all rows.
    """

    slots: range
    part: int = 0
    parts: int = 1


def ids_per_slot(offsets: Tensor, slots: int) -> list[int]:
    """Return the ids of every slot, from the (S * bags + 1,) offsets of all bags."""
    bags = (offsets.numel() - 1) // slots
    return offsets[::bags].diff().tolist() if bags else [0] * slots


def cut_bags(ids: Sequence[int], widths: Sequence[int], bags: int, threads: int) -> list[Block]:
    """Return blocks of about equal work that cover all bags of all slots, the largest first.

    Args:
        ids: number of ids of each slot.
        widths: the columns of each slot.
        bags: number of bags of every slot.
        threads: number of threads that share the blocks.
    """
    work = [(n + bags) * width for n, width in zip(ids, widths, strict=True)]
    most = sum(work) / (_TASKS_PER_THREAD * threads)
    if threads == 1 or not bags or sum(work) < LEAST_VALUES:
        return [Block(range(len(ids)), range(bags))]
    found: list[tuple[float, Block]] = []
    values = _CACHED_VALUES
    for slot, (cost, width) in enumerate(zip(work, widths, strict=True)):
        # Enough pieces for all threads, each of whose output fits the cache.
        pieces = min(bags, max(math.ceil(cost / most), math.ceil(bags * width / _CACHED_VALUES)))
        if pieces > 1:
            cuts = [bags * i // pieces for i in range(pieces + 1)]
            found += [
                (cost / pieces, Block(range(slot, slot + 1), range(a, b)))
                for a, b in pairwise(cuts)
            ]
            values = _CACHED_VALUES
            continue
        values += bags * width
        if found and values <= _CACHED_VALUES and found[-1][0] + cost <= most:
            before, block = found[-1]
            found[-1] = before + cost, Block(range(block.slots.start, slot + 1), block.bags)
        else:
            found.append((cost, Block(range(slot, slot + 1), range(bags))))
            values = bags * width
    return _largest_first(found)


def cut_rows(
    ids: Sequence[int], widths: Sequence[int], shards: Sequence[int], threads: int
) -> list[RowShare]:
    """Return shares that together touch every row of every shard, each row in one share.

    Args:
        ids: number of ids of each slot.
        widths: the columns of each slot.
        shards: the number of each slot's shard, ascending.
        threads: number of threads that work the shares off.
    """
    work = [n * width for n, width in zip(ids, widths, strict=True)]
    total = sum(work)
    if threads == 1 or total < LEAST_VALUES:
        return [RowShare(range(len(ids)))]
    found: list[tuple[float, RowShare]] = []
    for _, same in groupby(range(len(ids)), key=lambda slot: shards[slot]):
        # All slots of a shard stay together: two threads must not update one row.
        slots = list(same)
        cost = sum(work[slot] for slot in slots)
        first, last = slots[0], slots[-1] + 1
        if cost > total / threads:
            # A power of two, so that `take_share` finds its blocks by a mask.
            parts = 1 << (threads - 1).bit_length()
            found += [(cost / parts, RowShare(range(first, last), i, parts)) for i in range(parts)]
        elif (
            found
            and found[-1][1].parts == 1
            and found[-1][0] + cost <= total / (_TASKS_PER_THREAD * threads)
        ):
            before, share = found[-1]
            found[-1] = before + cost, RowShare(range(share.slots.start, last))
        else:
            found.append((cost, RowShare(range(first, last))))
    return _largest_first(found)


def _largest_first(found: list[tuple[float, P]]) -> list[P]:
    return [part for _, part in sorted(found, key=lambda pair: -pair[0])]


def take_share(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, share: RowShare
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids of a share, in the same bags and the same order.

    Args:
        ids: (N,) int64 of all slots. Equal ids of slots of one shard are the same row.
        offsets: (S * bags + 1,) of all slots, slot by slot.
        weights: (N,) or None.
        bags: number of bags of every slot.
    Returns:
        ids, offsets from 0 and weights of the share's slots alone. Bags keep their number and lose
        the ids of other shares. `ids` and `weights` are views where the share has all rows.
    """
    offsets = offsets[share.slots.start * bags : share.slots.stop * bags + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    ids, offsets = ids[first:last], offsets - first
    weights = None if weights is None else weights[first:last]
    if share.parts == 1:
        return ids, offsets, weights
    # A block is 1 << _ROW_BITS rows; the bits above count blocks, modulo `parts`.
    mine = ids.bitwise_and((share.parts - 1) << _ROW_BITS) == share.part << _ROW_BITS
    return take_where(mine, ids, offsets, weights)


def take_where(
    mine: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids where `mine`, (N,) bool, is set, in the same bags and the same order."""
    # how many ids are kept before each bag: the offsets of what is left
    kept = complete_cumsum(mine.long()).index_select(0, offsets)
    return _compress(ids, mine), kept, None if weights is None else _compress(weights, mine)


def _compress(values: Tensor, mine: Tensor) -> Tensor:
    # torch's masked_select takes five times as long
    return torch.from_numpy(values.numpy().compress(mine.numpy()))
