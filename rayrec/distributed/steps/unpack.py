"""Messages that arrived in the input step, and the ids that one lookup kernel reads of them."""

# P pieces, N ids

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds, bag_offsets
from rayrec.distributed.program.groups import LookupGroup, Piece, Slot
from rayrec.distributed.program.slots import Sizes
from rayrec.sparse.ops import offsets_of, to_device


class Arrived(NamedTuple):
    """Message of one source rank to this rank, by piece.

    Attributes:
        ids: per piece (N,) int64.
        lengths: per piece (bags,) int32; empty for the pieces of sequences.
        weights: weighted piece -> (N,) float32.
    """

    ids: Sequence[Tensor]
    lengths: Sequence[Tensor]
    weights: Mapping[int, Tensor]

    @staticmethod
    def of(message: Tensor, sizes: Sizes, pieces: Sequence[Piece]) -> Arrived:
        """Read a message, (words,) int32."""
        # ids first, two words each, then lengths, then weights, all piece by piece
        weighted = {i: sizes.ids[i] for i, piece in enumerate(pieces) if piece.weighted}
        words = [2 * sum(sizes.ids), sum(sizes.bags), sum(weighted.values())]
        ids, lengths, weights = message[: sum(words)].split(words)
        of_pieces = weights.view(torch.float32).split(list(weighted.values()))
        return Arrived(
            ids.view(torch.int64).split(list(sizes.ids)),
            lengths.split(list(sizes.bags)),
            dict(zip(weighted, of_pieces, strict=True)),
        )


def pooled_ids(group: LookupGroup, rows: Sequence[int], arrived: Sequence[Arrived]) -> GroupIds:
    """Return for each slot the bags of all sources, source by source.

    Args:
        rows: per source, the bags of every slot: a piece with fewer is padded by empty bags.
        arrived: per source.
    """
    pieces = [slot.piece for slot in group.slots]
    weights = None
    if group.key.weighted:
        weights = torch.cat([source.weights[piece] for piece in pieces for source in arrived])
    parts = [source.ids[piece] for piece in pieces for source in arrived]
    sizes = tuple(part.numel() for part in parts) if group.key.dynamic else ()
    return GroupIds(
        ids=torch.cat(parts),
        offsets=bag_offsets(_padded(arrived, pieces, rows, group.gaps)),
        weights=weights,
        lags=_lags(group, [slot for slot in group.slots for _ in arrived], parts),
        parts=sizes,
    )


def _padded(
    arrived: Sequence[Arrived], pieces: Sequence[int], rows: Sequence[int], gaps: Sequence[int]
) -> Tensor:
    """Return the lengths of the bags of all sources, piece by piece.

    Before a piece with a gap there are empty bags, which stand for the columns of the gap.
    """
    none = arrived[0].lengths[pieces[0]].new_zeros(sum(rows))
    parts: list[Tensor] = []
    for piece, gap in zip(pieces, gaps, strict=True):
        if gap:
            parts.append(none)
        for source, count in zip(arrived, rows, strict=True):
            lengths = source.lengths[piece]
            parts.append(lengths)
            if lengths.numel() < count:
                parts.append(none[lengths.numel() : count])
    return torch.cat(parts)


def sequence_ids(group: LookupGroup, arrived: Sequence[Arrived]) -> GroupIds:
    """Return for each source the ids of all slots, each a bag of its own.

    The ids are rows of the shards of the group, one shard below the other; those of dynamic tables
    stay as they are.
    """
    parts = [source.ids[slot.piece] for source in arrived for slot in group.slots]
    lags = _lags(group, group.slots * len(arrived), parts)
    merged = torch.cat(parts)
    if len(group.shards) > 1 and not group.key.dynamic:
        firsts = offsets_of(len(shard.rows) for shard in group.shards)
        of_slots = [firsts[i] for i in group.slot_shards]
        shift = to_device(of_slots * len(arrived), merged.device)
        sizes = to_device([part.numel() for part in parts], merged.device)
        merged = merged + shift.repeat_interleave(sizes, output_size=merged.numel())
    offsets = torch.arange(merged.numel() + 1, device=merged.device)
    sizes_of = tuple(part.numel() for part in parts) if group.key.dynamic else ()
    return GroupIds(merged, offsets, None, lags, sizes_of)


def _lags(group: LookupGroup, slots: Sequence[Slot], parts: Sequence[Tensor]) -> Tensor | None:
    """Return the (N,) lags of the ids of some parts; None where the group has none.

    Args:
        slots: of each part.
    """
    if not group.has_lags:
        return None
    lags = torch.tensor([slot.use.lag for slot in slots])
    return lags.repeat_interleave(torch.tensor([part.numel() for part in parts]))
