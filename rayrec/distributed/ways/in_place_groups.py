"""Groups of slots that one kernel updates from gradients in shared memory, and their ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import WORD, GroupIds, bag_offsets
from rayrec.distributed.program.groups import (
    GradientColumns,
    GroupKey,
    LookupGroup,
    Slot,
    is_vectorized,
)
from rayrec.distributed.steps.unpack import Arrived
from rayrec.layout import Shard


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
    group: LookupGroup, counts: Sequence[Sequence[int]], arrived: Sequence[Arrived]
) -> GroupIds:
    """Return bags of one id for what all ranks look up, empty where another rank updates the row.

    Args:
        counts: per source, the ids of every use of the collection.
    Returns:
        Ids are rows of the shared memory.
    """
    of_use: dict[int, list[tuple[Slot, int]]] = {}
    for slot, shard in zip(group.slots, group.slot_shards, strict=True):
        of_use.setdefault(slot.use.index, []).append((slot, group.bases[shard]))
    device = arrived[0].ids[group.slots[0].piece].device
    one = torch.ones(max(max(of_source) for of_source in counts), dtype=WORD, device=device)
    none = torch.zeros_like(one)
    ids: list[Tensor] = []
    lengths: list[Tensor] = []
    # Source by source and use by use, as the rows of the gradients lie.
    for of_source, source in zip(counts, arrived, strict=True):
        for use, count in enumerate(of_source):
            mine = of_use.get(use, [])
            if not mine:
                lengths.append(none[:count])
            elif len(mine) == 1 and mine[0][0].whole:
                slot, base = mine[0]
                ids.append(source.ids[slot.piece] + base)
                lengths.append(one[:count])
            else:
                here, places = _own_rows(source.ids[mine[0][0].piece], mine)
                ids.append(places[here])
                lengths.append(here.to(WORD))
    return GroupIds(torch.cat(ids), bag_offsets(torch.cat(lengths)), None)


def _own_rows(rows_N: Tensor, mine: Sequence[tuple[Slot, int]]) -> tuple[Tensor, Tensor]:
    """Return which ids (N,) lie in this rank's shards, and where in memory those do."""
    places, here = rows_N, torch.zeros_like(rows_N, dtype=torch.bool)
    for slot, base in mine:
        first, end = slot.shard.rows.start, slot.shard.rows.stop
        inside = (rows_N >= first) & (rows_N < end)
        places = torch.where(inside, rows_N + (base - first), places)
        here = here | inside
    return here, places
