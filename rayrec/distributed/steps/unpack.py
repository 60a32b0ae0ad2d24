"""What arrived in the input step, sorted for each lookup group."""

# P pieces, N ids

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import WORD, GroupIds, bag_offsets
from rayrec.distributed.program.groups import GroupKey, LookupGroup, Piece, Slot
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.sparse.ops import offsets_of, to_device


class Arrived(NamedTuple):
    """What one source has for this rank, by piece: (N,) int64 ids, (bags,) int32 lengths of pooled
    pieces, weights of weighted ones.
    """

    ids: Sequence[Tensor]
    lengths: Sequence[Tensor]
    weights: Mapping[int, Tensor]

    @staticmethod
    def of(message: Tensor, sizes: Sizes, pieces: Sequence[Piece]) -> Arrived:
        """From a message, (words,) int32."""
        weighted = {i: sizes.ids[i] for i, piece in enumerate(pieces) if piece.weighted}
        words = [2 * sum(sizes.ids), sum(sizes.bags), sum(weighted.values())]
        ids, lengths, weights = message[: sum(words)].split(words)
        return Arrived(
            ids.view(torch.int64).split(list(sizes.ids)),
            lengths.split(list(sizes.bags)),
            dict(
                zip(
                    weighted,
                    weights.view(torch.float32).split(list(weighted.values())),
                    strict=True,
                )
            ),
        )


def unpack(
    slots: SlotTable, rank: int, got: Sequence[Sizes], arrived: Sequence[Arrived]
) -> dict[GroupKey, GroupIds]:
    """Sort what arrived, for each lookup group; see `GroupIds`.

    Args:
        got, arrived: per source rank.
    """
    mine = slots.ranks[rank]
    ids, lengths, weights = zip(*arrived, strict=True)  # [source][piece]
    groups = {}
    for group in mine.groups:
        pieces = [slot.piece for slot in group.slots]
        if group.key.sequence:
            groups[group.key] = (
                _sequence_in_place(slots, group, got, ids)
                if group.key.in_place
                else _sequence_ids(group, ids)
            )
            continue
        if group.key.in_place:
            rows = [sizes.extents[slots.extents[group.key.collection].start] for sizes in got]
        else:
            rows = [mine.matrix_of[group.key].rows(sizes) for sizes in got]
        groups[group.key] = GroupIds(
            ids=torch.cat([source[piece] for piece in pieces for source in ids]),
            offsets=bag_offsets(_padded(lengths, pieces, rows, group.gaps)),
            weights=torch.cat([source[piece] for piece in pieces for source in weights])
            if group.key.weighted
            else None,
        )
    return groups


def _padded(
    lengths: Sequence[Sequence[Tensor]],
    pieces: Sequence[int],
    rows: Sequence[int],
    gaps: Sequence[int],
) -> Tensor:
    """Lengths of the bags of all sources, piece by piece; a piece with fewer bags than its matrix
    has rows is padded by empty ones.

    Before a piece with a gap there is one of empty bags.
    """
    none = lengths[0][pieces[0]].new_zeros(sum(rows))
    parts: list[Tensor] = []
    for piece, gap in zip(pieces, gaps, strict=True):
        if gap:
            parts.append(none)
        for source, count in zip(lengths, rows, strict=True):
            parts.append(source[piece])
            if source[piece].numel() < count:
                parts.append(none[source[piece].numel() : count])
    return torch.cat(parts)


def _sequence_ids(group: LookupGroup, ids: Sequence[Sequence[Tensor]]) -> GroupIds:
    bases = offsets_of(len(shard.rows) for shard in group.shards)
    parts = [source[slot.piece] for source in ids for slot in group.slots]
    merged = torch.cat(parts)
    if len(group.shards) > 1:
        shift = to_device([bases[i] for _ in ids for i in group.slot_shards], merged.device)
        sizes = to_device([part.numel() for part in parts], merged.device)
        merged = merged + shift.repeat_interleave(sizes, output_size=merged.numel())
    return GroupIds(merged, torch.arange(merged.numel() + 1, device=merged.device), None)


def _sequence_in_place(
    slots: SlotTable, group: LookupGroup, got: Sequence[Sizes], ids: Sequence[Sequence[Tensor]]
) -> GroupIds:
    """Bags of one id for what all ranks look up in the collection, empty where another rank
    updates. Ids are rows of the memory.
    """
    of_use: dict[int, list[tuple[Slot, int]]] = {}
    for slot, shard in zip(group.slots, group.slot_shards, strict=True):
        of_use.setdefault(slot.use.index, []).append((slot, group.bases[shard]))
    extents = slots.extents[group.key.collection]
    one = torch.ones(
        max(max(sizes.extents[extents]) for sizes in got),
        dtype=WORD,
        device=ids[0][group.slots[0].piece].device,
    )
    none, found, lengths = torch.zeros_like(one), [], []
    for sizes, source in zip(got, ids, strict=True):
        for use, count in enumerate(sizes.extents[extents]):
            mine = of_use.get(use, [])
            if len(mine) == 1 and mine[0][0].whole:
                found.append(source[mine[0][0].piece] + mine[0][1])
                lengths.append(one[:count])
                continue
            if not mine:
                lengths.append(none[:count])
                continue
            rows = places = source[mine[0][0].piece]
            here = torch.zeros_like(rows, dtype=torch.bool)
            for slot, base in mine:
                first, end = slot.shard.rows.start, slot.shard.rows.stop
                inside = (rows >= first) & (rows < end)
                places, here = torch.where(inside, rows + (base - first), places), here | inside
            found.append(places[here])
            lengths.append(here.to(WORD))
    return GroupIds(torch.cat(found), bag_offsets(torch.cat(lengths)), None)
