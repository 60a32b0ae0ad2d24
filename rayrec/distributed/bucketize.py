"""Cutting bags by row blocks, on the rank where they were read.

Features with equally many blocks are cut by one FBGEMM call; one call for all of them with the largest block count would make a
lengths matrix of blocks x features x bags (128 x 500 x 4096 is 1 GiB). Features with one block are taken as they are.
"""

# B local batch, F features, N ids, n row blocks

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.errors import InputError
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class Bucketing:
    """Features of a KJT that are cut into the same number of row blocks, so that one kernel call cuts them all."""

    blocks: int
    features: tuple[int, ...]  # rows of the KJT
    cuts: tuple[Tensor, ...]


@dataclass(frozen=True)
class SourcePart:
    """Rows of bags that share one lengths and one ids tensor.

    Attributes:
        lengths: (rows * B,) int32.
        ids: (N,) int64, row by row.
        weights: (N,) float32, or None.
        counts: ids of each row.
    """

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    counts: list[int]


@dataclass(frozen=True)
class SourceRows:
    """The bags of a KJT as rows of bags: the KJT's own keys first, then per bucketing blocks x features, block by block."""

    parts: tuple[SourcePart, ...]
    batch_size: int

    @property
    def counts(self) -> list[int]:
        """Ids of every row."""
        return [count for part in self.parts for count in part.counts]


def block_bucketize(lengths: Tensor, ids: Tensor, weights: Tensor | None, cuts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cut F features at their row cuts; the ids of a block become local to its first row.

    Args:
        lengths: (F * B,) int32.
        ids: (N,) int64, below the last cut of their feature.
        weights: (N,) float32, or None.
        cuts: per feature (n + 1,) int64, starting at 0.
    Returns:
        lengths (n * F * B,), block-major; ids (N,); weights (N,) or None. The order inside a bag is kept.
    """
    blocks = cuts[0].numel() - 1
    # block_sizes of zero would make the operator hash by modulo even though cuts are given
    sizes = torch.ones(len(cuts), dtype=torch.int64, device=ids.device)
    out = torch.ops.fbgemm.block_bucketize_sparse_features(
        lengths, ids, False, False, sizes, blocks, weights, block_bucketize_pos=list(cuts)
    )
    return out[0], out[1], out[2]


def block_bucketize_reference(
    lengths: Tensor, ids: Tensor, weights: Tensor | None, cuts: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`block_bucketize` in plain torch, for tests."""
    blocks, features = cuts[0].numel() - 1, len(cuts)
    bags = ids.split(lengths.tolist())
    bag_weights = weights.split(lengths.tolist()) if weights is not None else None
    batch = len(bags) // features
    out_lengths, out_ids, out_weights = [], [ids[:0]], [weights[:0]] if weights is not None else None
    for block in range(blocks):
        for i, bag in enumerate(bags):
            low, high = cuts[i // batch][block : block + 2].tolist()
            inside = (bag >= low) & (bag < high)
            out_lengths.append(int(inside.sum()))
            out_ids.append(bag[inside] - low)
            if bag_weights is not None and out_weights is not None:
                out_weights.append(bag_weights[i][inside])
    return torch.tensor(out_lengths, dtype=lengths.dtype), torch.cat(out_ids), None if out_weights is None else torch.cat(out_weights)


def bucketize(kjt: KeyedJaggedTensor, bucketings: Sequence[Bucketing], weighted: bool) -> SourceRows:
    """All source rows of a KJT.

    Raises:
        InputError: weights are wanted and the KJT has none, or the KJT has a variable batch per feature.
    """
    if kjt.variable_stride_per_key():
        raise InputError("this KeyedJaggedTensor has a variable batch per feature, which sharded collections do not support yet.")
    weights = kjt.weights_or_none() if weighted else None
    if weighted and weights is None:
        raise InputError("a weighted EmbeddingBagCollection got a KeyedJaggedTensor without weights; pass weights=, one per id.")
    batch, lengths, ids = kjt.stride(), kjt.lengths().to(torch.int32), kjt.values().to(torch.int64)
    weights = weights.to(torch.float32) if weights is not None else None
    parts = [SourcePart(lengths, ids, weights, list(kjt.length_per_key()))]
    bounds = kjt.offset_per_key() if bucketings else []
    for cut in bucketings:
        if cut.features == tuple(range(len(kjt.keys()))):
            taken = lengths, ids, weights
        else:
            per_key = lengths.view(len(kjt.keys()), batch)
            spans = [slice(bounds[f], bounds[f + 1]) for f in cut.features]
            taken = (
                torch.cat([per_key[f] for f in cut.features]),
                torch.cat([ids[span] for span in spans]),
                None if weights is None else torch.cat([weights[span] for span in spans]),
            )
        b_lengths, b_ids, b_weights = block_bucketize(*taken, cut.cuts)
        rows = cut.blocks * len(cut.features)
        parts.append(SourcePart(b_lengths, b_ids, b_weights, b_lengths.view(rows, batch).sum(1, dtype=torch.int64).tolist()))
    return SourceRows(tuple(parts), batch)
