"""Messages that arrived in the input step, and the ids that one lookup kernel reads of them."""

# P pieces, N ids

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds, bag_offsets
from rayrec.distributed.program.groups import LookupGroup, Piece, Slot
from rayrec.distributed.program.slots import Sizes
from rayrec.sparse.ops import offsets_of, to_device

# values of pieces, one piece after the other, and how many each has
Runs = Sequence[tuple[Tensor, Sequence[int]]]


class Arrived:
    """Message of one source rank to this rank, by piece.

    Args:
        pieces: those of this rank; lengths and weights are of the pooled and of the weighted ones.
        ids: int64. lengths: int32, per bag. weights: float32.
    """

    def __init__(self, pieces: Sequence[Piece], ids: Runs, lengths: Runs, weights: Runs) -> None:
        self._pieces, self._ids, self._lengths, self._weights = pieces, ids, lengths, weights

    @staticmethod
    def of(message: Tensor, sizes: Sizes, pieces: Sequence[Piece]) -> Arrived:
        """Read a message, (words,) int32."""
        # ids first, two words each, then lengths, then weights, all piece by piece
        weighted = [ids for ids, piece in zip(sizes.ids, pieces, strict=True) if piece.weighted]
        bags = [one for one, piece in zip(sizes.bags, pieces, strict=True) if not piece.sequence]
        words = [2 * sum(sizes.ids), sum(bags), sum(weighted)]
        ids, lengths, weights = message[: sum(words)].split(words)
        return Arrived(
            pieces,
            [(ids.view(torch.int64), sizes.ids)],
            [(lengths, bags)],
            [(weights.view(torch.float32), weighted)],
        )

    @cached_property
    def ids(self) -> list[Tensor]:
        """Per piece (N,) int64."""
        return list(_by_piece(self._ids))

    @cached_property
    def lengths(self) -> Mapping[int, Tensor]:
        """Piece -> (bags,) int32, of those that are not of sequences."""
        pooled = (i for i, piece in enumerate(self._pieces) if not piece.sequence)
        return dict(zip(pooled, _by_piece(self._lengths), strict=True))

    @cached_property
    def weights(self) -> Mapping[int, Tensor]:
        """Weighted piece -> (N,) float32."""
        weighted = (i for i, piece in enumerate(self._pieces) if piece.weighted)
        return dict(zip(weighted, _by_piece(self._weights), strict=True))

    def in_one(
        self, pieces: Sequence[int], bags: int
    ) -> tuple[Tensor, Sequence[int], Tensor] | None:
        """Return the ids of these pieces, how many each has, and the lengths, if the pieces lie one
        after the other, and are all.

        Args:
            bags: of each piece; else there is none.
        """
        if len(self._ids) != 1 or len(self._lengths) != 1:
            return None
        (ids, of_pieces), (lengths, sizes) = *self._ids, *self._lengths
        if len(sizes) != len(of_pieces) or any(size != bags for size in sizes):
            return None
        if pieces != list(range(len(of_pieces))):
            return None
        return ids, of_pieces, lengths


def _by_piece(runs: Runs) -> Iterator[Tensor]:
    return (one for values, sizes in runs for one in values.split_with_sizes(list(sizes)))


def pooled_ids(group: LookupGroup, rows: Sequence[int], arrived: Sequence[Arrived]) -> GroupIds:
    """Return for each slot the bags of all sources, source by source.

    Args:
        rows: per source, the bags of every slot: a piece with fewer is padded by empty bags.
        arrived: per source.
    """
    pieces = [slot.piece for slot in group.slots]
    if len(arrived) == 1 and not (group.key.weighted or group.has_lags or any(group.gaps)):
        # nothing need be copied for one rank whose keys are in the order of its tables
        whole = arrived[0].in_one(pieces, rows[0])
        if whole is not None:
            ids, of_pieces, lengths = whole
            sizes = tuple(of_pieces) if group.key.dynamic else ()
            return GroupIds(ids, bag_offsets(lengths), None, parts=sizes)
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
