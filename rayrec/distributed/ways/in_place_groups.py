"""Gradients in memory that all ranks of a host share: the memory, the groups of slots that one
kernel updates from there, and their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.comm.pages import make_huge
from rayrec.distributed.kernels.dynamic_ids import size_of
from rayrec.distributed.kernels.ids import WORD, GroupIds, bag_offsets
from rayrec.distributed.program.groups import (
    GradientColumns,
    GroupKey,
    LookupGroup,
    Piece,
    Slot,
    is_vectorized,
)
from rayrec.distributed.steps.unpack import Arrived
from rayrec.dynamic.key_blocks import first_rows
from rayrec.layout import Shard

_LEAST_BYTES = 1 << 20


class SharedGradients:
    """Memory for the gradients of one step of all ranks; it grows to the largest step.

    Attributes:
        free: True once every rank has read those of the last step.
    """

    def __init__(self) -> None:
        self.free = True
        self._memory = torch.empty(0)

    def matrices(self, shapes: Sequence[tuple[int, int]], exchange: Exchange) -> list[Tensor]:
        """Return one matrix of each shape, which all ranks share; all ranks call it together.

        The contents are those of a former step. The memory grows to a power of two of bytes; all
        ranks know all shapes, so all grow in the same step.
        """
        sizes = [rows * width for rows, width in shapes]
        if self._memory.numel() < sum(sizes):
            size = max(_LEAST_BYTES, 1 << (4 * sum(sizes) - 1).bit_length())
            memory = exchange.share(size)
            assert memory is not None, "tables are shared"
            if exchange.rank == 0:
                make_huge(memory)
            self._memory = memory.view(torch.float32)
        parts = self._memory[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def ascending_chains(key: GroupKey, slots: Sequence[Slot]) -> tuple[list[Slot], list[list[Slot]]]:
    """Return the slots whose gradients must be gathered, and chains of slots that ascend by column.

    Gradients are gathered where the columns of a shard are no run, or where the kernel needs it.
    """
    by_shard: dict[Shard, list[Slot]] = {}
    for slot in sorted(slots, key=lambda s: s.column):
        by_shard.setdefault(slot.shard, []).append(slot)
    clipped = key.optimizer.max_gradient is not None
    all_gathered = clipped or not is_vectorized(key.optimizer, key.data_type)
    gathered: list[Slot] = []
    chains: list[list[Slot]] = []
    for run in by_shard.values():
        if all_gathered or any(a.column + a.width != b.column for a, b in pairwise(run)):
            gathered.extend(run)
            continue
        fitting = (c for c in chains if c[-1].column + c[-1].width <= run[0].column)
        chain = next(fitting, None)
        if chain is None:
            chains.append(run)
        else:
            chain.extend(run)
    return gathered, chains


def columns_of(chain: Sequence[Slot]) -> GradientColumns:
    gaps = (b.column - a.column - a.width for a, b in pairwise(chain))
    return GradientColumns(chain[0].column, (0, *gaps))


def sequence_ids_in_place(
    group: LookupGroup,
    pieces: Sequence[Piece],
    counts: Sequence[Sequence[int]],
    arrived: Sequence[Arrived],
) -> GroupIds:
    """Return bags of one id for what all ranks look up, empty where another rank updates the row.

    Args:
        pieces: those of this rank.
        counts: per source, the ids of every use of the collection.
    Returns:
        Ids are rows of the shared memory. Those of dynamic tables stay as they are, and `places`
        says where the ids of each slot are.
    """
    of_use: dict[int, list[int]] = {}
    for i, slot in enumerate(group.slots):
        of_use.setdefault(slot.use.index, []).append(i)
    one = torch.ones(max(max(of_source) for of_source in counts), dtype=WORD)
    none = torch.zeros_like(one)
    ids: list[Tensor] = []
    lengths: list[Tensor] = []
    lags: list[Tensor] = []
    places: list[list[slice | Tensor]] = [[] for _ in group.slots]
    at = 0
    # Source by source and use by use, as the rows of the gradients lie.
    for of_source, source in zip(counts, arrived, strict=True):
        for use, count in enumerate(of_source):
            mine = of_use.get(use, [])
            if not mine:
                lengths.append(none[:count])
                continue
            slot = group.slots[mine[0]]
            own = source.ids[slot.piece]
            if slot.whole:
                lengths.append(one[:count])
                if group.key.dynamic:
                    places[mine[0]].append(slice(at, at + count))
                else:
                    own = own + group.bases[group.slot_shards[mine[0]]]
            else:
                inside = _inside(group, mine, own, pieces[slot.piece])
                here = torch.stack(inside).any(0)
                if group.key.dynamic:
                    for i, of_shard in zip(mine, inside, strict=True):
                        places[i].append(of_shard[here].nonzero().view(-1) + at)
                else:
                    own = _in_memory(group, mine, own, inside)
                own = own[here]
                lengths.append(here.to(WORD))
            ids.append(own)
            if group.has_lags:
                lags.append(torch.full((own.numel(),), slot.use.lag))
            at += own.numel()
    offsets = bag_offsets(torch.cat(lengths))
    sizes = tuple(size_of(place) for of_slot in places for place in of_slot)
    lags_N = torch.cat(lags) if lags else None
    return GroupIds(torch.cat(ids), offsets, None, lags_N, sizes, places)


def _inside(group: LookupGroup, mine: Sequence[int], ids: Tensor, piece: Piece) -> list[Tensor]:
    """Return for each of some slots which ids (N,) lie in its shard."""
    rows_N = first_rows(ids, *piece.dynamic) if group.key.dynamic else ids
    shards = [group.slots[i].shard.rows for i in mine]
    return [(rows_N >= rows.start) & (rows_N < rows.stop) for rows in shards]


def _in_memory(
    group: LookupGroup, mine: Sequence[int], rows_N: Tensor, inside: Sequence[Tensor]
) -> Tensor:
    """Return the rows of the shared memory for (N,) rows of a table, where they lie in a shard."""
    places = rows_N
    for i, of_shard in zip(mine, inside, strict=True):
        shift = group.bases[group.slot_shards[i]] - group.slots[i].shard.rows.start
        places = torch.where(of_shard, rows_N + shift, places)
    return places
