"""Cut ids by row blocks, on the rank where they were read, so that they can be sent.

Features with equally many blocks are cut by one FBGEMM call; one call for all of them with the
largest block count would make a lengths matrix of blocks x features x bags (128 x 500 x 4096 is 1
GiB). Features with one block are taken as they are. Sequence features are cut as one long bag each,
and remember where every id came from (its home), since their rows come back in the order sent.

Of a bag with few ids most row blocks get none. Where that leaves enough bags empty they stay at
home; see `rayrec.distributed.ways.compact`.
"""

# B bags of a feature, F features, N ids, n row blocks, E bags with ids

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayrec.distributed.steps.source_rows import FilledBags, SourcePart, SourceRows
from rayrec.dynamic.key_blocks import first_rows
from rayrec.errors import InputError, ShapeError
from rayrec.layout.kinds import COMPACT_BELOW
from rayrec.sparse import KeyedJaggedTensor
from rayrec.sparse.ops import offsets_of, to_device


@dataclass(frozen=True)
class Bucketing:
    """Features of a KJT that one kernel call cuts: they have equally many row blocks."""

    blocks: int
    features: tuple[int, ...]  # rows of the KJT
    cuts: tuple[Tensor, ...]
    sequence: bool
    weighted: bool
    leaves_out: bool = False
    dynamic: tuple[tuple[int, int], ...] = ()  # per feature, see `Piece`; empty if none is


def block_bucketize(
    lengths: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    cuts: Sequence[Tensor],
    bags: Sequence[int] | None,
    where: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Cut F features at their row cuts; the ids of a block become local to its first row.

    Args:
        lengths: (sum of bags,) int32.
        ids: (N,) int64, below the last cut of their feature.
        weights: (N,) float32, or None.
        cuts: per feature (n + 1,) int64, starting at 0.
        bags: bags per feature when they differ.
        where: True returns the origin of each id as well.
    Returns:
        lengths (n * sum of bags,), block-major; ids (N,); weights (N,) or None; origin (N,) or
        None: ids_out[i] was cut from ids[origin[i]]. The order inside a bag is kept.
    """
    blocks = cuts[0].numel() - 1
    # block_sizes of zero would make the operator hash by modulo even though cuts are given
    sizes = torch.ones(len(cuts), dtype=torch.int64, device=ids.device)
    varying = None if bags is None else to_device(bags, lengths.device, lengths.dtype)
    most = -1 if bags is None else max(bags)
    out = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths, ids, False, where, sizes, blocks, weights, varying, most, list(cuts)
    )
    origin = None
    if where:
        # The operator tells where each id went; `origin` is the inverse.
        origin = torch.empty_like(ids)
        origin[out[4].long()] = torch.arange(ids.numel(), device=ids.device)
    return out[0], out[1], out[2], origin


def bucketize(
    kjt: KeyedJaggedTensor, bucketings: Sequence[Bucketing], weighted: bool, track: bool
) -> SourceRows:
    """Return all source rows of a KJT.

    Args:
        bucketings: features to cut, by the number of their row blocks.
        weighted: True if any collection reads weights.
        track: also remember the origin of weighted pooled ids, for the gradient of their weights.
    Raises:
        InputError: weights are wanted and the KJT has none.
        ShapeError: they are not one number per id.
    """
    weights = kjt.weights_or_none() if weighted else None
    if weighted and weights is None:
        raise InputError(
            "a weighted EmbeddingBagCollection got a KeyedJaggedTensor without "
            "weights; pass weights=, one per id."
        )
    if weights is not None:
        if weights.shape != kjt.values().shape:
            raise ShapeError(
                f"weights have shape {tuple(weights.shape)} for ids of shape "
                f"{tuple(kjt.values().shape)}; give one number per id."
            )
        weights = _viewable(weights.detach().to(torch.float32))
    lengths = _viewable(kjt.lengths().reshape(-1).to(torch.int32))
    ids = _viewable(kjt.values().to(torch.int64))
    bags, bounds = kjt.stride_per_key(), kjt.offset_per_key()
    whole = SourcePart(ids, list(kjt.length_per_key()), list(bags), lengths, weights)
    varying = kjt.variable_stride_per_key()
    cuts = [_cut(whole, bounds, one, track, varying) for one in bucketings]
    parts = [whole]
    counted: dict[int, _Filled] = {}
    for cut, numbers in zip(cuts, _read([cut.numbers for cut in cuts]), strict=True):
        rows = len(cut.part.bags)
        if cut.mask is not None:
            counted[len(parts)] = _Filled(cut.mask, numbers[rows:-1], numbers[-1], cut.all_bags)
        parts.append(replace(cut.part, counts=numbers[:rows]))
    filled = None
    with_ids = sum(part.total for part in counted.values())
    # An index costs more than it saves where most bags have ids in most blocks.
    if counted and with_ids < COMPACT_BELOW * sum(parts[i].lengths.numel() for i in counted):
        filled = _leave_out(parts, counted)
    return SourceRows(tuple(parts), bounds, kjt.offsets, filled)


def _cut(
    whole: SourcePart, bounds: Sequence[int], cut: Bucketing, track: bool, varying_keys: bool
) -> _Cut:
    """Cut the features of one bucketing by their row blocks, by one call of the kernel.

    Args:
        whole: the KJT as it is.
        bounds: first id of each of its keys, and the end.
        track: remember the origin of weighted pooled ids.
        varying_keys: keys of the KJT have different numbers of bags.
    """
    ids, lengths, weights = whole.ids, whole.lengths, whole.weights
    spans = [slice(bounds[f], bounds[f + 1]) for f in cut.features]
    in_place = cut.features == tuple(range(len(whole.bags)))
    cut_ids = ids if in_place else torch.cat([ids[span] for span in spans])
    if cut.sequence:
        # One long bag: the ids of a block keep their order, and no lengths travel.
        bags = [1] * len(cut.features)
        sizes = [span.stop - span.start for span in spans]
        cut_lengths = to_device(sizes, ids.device, torch.int32)
    else:
        bags, cut_lengths = [whole.bags[f] for f in cut.features], lengths
        if not in_place:
            of_keys = lengths.split(whole.bags)
            cut_lengths = torch.cat([of_keys[f] for f in cut.features])
    cut_weights = None
    if weights is not None and cut.weighted:
        cut_weights = weights if in_place else torch.cat([weights[span] for span in spans])
    varying = None if len(set(bags)) == 1 else bags
    # Rows of sequences and gradients of learned weights must find their way home.
    where = cut.sequence or (track and cut.weighted)
    rows_N = cut_ids
    if cut.dynamic:
        sizes = [span.stop - span.start for span in spans]
        parts = zip(cut_ids.split(sizes), cut.dynamic, strict=True)
        rows_N = torch.cat([first_rows(part, *blocks) for part, blocks in parts])
    out_lengths, out_ids, out_weights, origin = block_bucketize(
        cut_lengths, rows_N, cut_weights, cut.cuts, varying, where or bool(cut.dynamic)
    )
    if cut.dynamic and origin is not None:  # ids of dynamic tables travel as they are
        out_ids, origin = cut_ids[origin], origin if where else None
    if origin is not None and not in_place:
        # `origin` counts the ids of this bucketing; it must count those of the KJT.
        ranges = [torch.arange(span.start, span.stop, device=ids.device) for span in spans]
        origin = torch.cat(ranges)[origin]
    rows = len(bags) * cut.blocks
    out_bags = [0] * rows if cut.sequence else bags * cut.blocks
    mask = None
    if varying is not None:
        of_rows = out_lengths.split(out_bags)
        numbers = torch.stack([row.sum(dtype=torch.int64) for row in of_rows])
    elif cut.leaves_out and not varying_keys:
        numbers, mask = _count(out_lengths, cut_lengths, rows)
    else:
        numbers = out_lengths.view(rows, -1).sum(1, dtype=torch.int64)
    part = SourcePart(out_ids, [], out_bags, out_lengths, out_weights, origin)
    return _Cut(part, numbers, mask, cut_lengths.numel())


class _Cut(NamedTuple):
    """One bucketing done, but that the host does not know its counts yet."""

    part: SourcePart
    numbers: Tensor  # ids of every row, and what `_count` adds
    mask: Tensor | None
    all_bags: int


def _read(numbers: Sequence[Tensor]) -> list[list[int]]:
    """Return vectors as lists; the host waits for the device once for all of them."""
    if not numbers:
        return []
    values = torch.cat(list(numbers)).tolist()
    bounds = offsets_of(part.numel() for part in numbers)
    return [values[a:b] for a, b in pairwise(bounds)]


class _Filled(NamedTuple):
    mask: Tensor  # (rows, B): bags of blocks with ids
    rows: list[int]  # their number, of every row
    bags: int  # bags with ids, before the cut
    all_bags: int

    @property
    def total(self) -> int:
        return sum(self.rows)


def _count(b_lengths: Tensor, c_lengths: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Count ids and bags of one bucketing, on the device.

    Args:
        b_lengths: (rows * B,) after the cut, row by row.
        c_lengths: (features * B,) before the cut.
    Returns:
        (2 * rows + 1,) int64: the ids of every row, the bags with ids of every row, and the bags
        with ids before the cut; and the (rows, B) mask of bags with ids.
    """
    lengths = b_lengths.view(rows, -1)
    mask = lengths != 0
    ids, filled, bags = lengths.sum(1, dtype=torch.int64), mask.sum(1), (c_lengths != 0).sum()
    return torch.cat([ids, filled, bags.view(1)]), mask


def _places(found: _Filled) -> Tensor:
    """Return the bags with ids as flat numbers, row * B + bag, ascending."""
    flat = found.mask.view(-1)
    if flat.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flat.numpy()))  # torch's takes ten times as long
    return torch.nonzero_static(flat, size=found.total).view(-1)


def _leave_out(parts: list[SourcePart], counted: dict[int, _Filled]) -> FilledBags:
    """Take bags without ids out of some parts, in place, and return the bags that are left.

    Args:
        counted: index of a part -> which of its bags have ids.
    """
    bags = []
    for i, found in counted.items():
        places = _places(found)
        parts[i] = replace(
            parts[i], bags=found.rows, lengths=parts[i].lengths.index_select(0, places)
        )
        bags.append(places.remainder_(found.mask.shape[1]))
    counts = [count for found in counted.values() for count in found.rows]
    device, num_bags = bags[0].device, next(iter(counted.values())).mask.shape[1]
    filled = torch.arange(max(counts), device=device) < to_device(counts, device)[:, None]
    return FilledBags(
        bags=torch.full(filled.shape, num_bags, device=device).masked_scatter_(
            filled, torch.cat(bags)
        ),
        once=all(found.total == found.bags for found in counted.values()),
        every=all(found.bags == found.all_bags for found in counted.values()),
    )


def _viewable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where its stride is not 1, so that it has no view of words.

    So are columns of a matrix, and an empty numpy array, whose stride may be anything.
    """
    # of a single element torch calls any stride contiguous, and still makes no view of it
    if tensor.numel() and tensor.stride(0) == 1:
        return tensor
    return tensor.new_empty(tensor.shape).copy_(tensor)
