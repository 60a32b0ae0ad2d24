"""The dot products of all pairs of features (DLRM).

They have a backward of their own: the product of a matrix with its transpose is symmetric, so the
gradient is one gather of the pairs into a symmetric matrix and one batched product, where autograd
would scatter and multiply twice.

    # B rows, F features, D width
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@cache
def _pairs(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flat positions of the pairs i < j in a (count, count) matrix, and the pair of each cell.

    The diagonal's pair is one past the last.
    """
    rows, cols = torch.triu_indices(count, count, offset=1)
    pair_of = torch.full((count, count), len(rows))
    pair_of[rows, cols] = pair_of[cols, rows] = torch.arange(len(rows))
    return (rows * count + cols).to(device), pair_of.reshape(-1).to(device)


class _PairwiseDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_BFD: Tensor) -> Tensor:
        ctx.save_for_backward(features_BFD)
        positions, _ = _pairs(features_BFD.shape[1], features_BFD.device)
        dots_BFF = torch.bmm(features_BFD, features_BFD.transpose(1, 2))
        return dots_BFF.flatten(1).index_select(1, positions)

    @staticmethod
    def backward(ctx: Any, grad_BP: Tensor) -> Tensor:
        (features_BFD,) = ctx.saved_tensors
        rows, count, _ = features_BFD.shape
        _, pair_of = _pairs(count, features_BFD.device)
        # the padded column is the diagonal's zero
        symmetric = functional.pad(grad_BP, (0, 1)).index_select(1, pair_of)
        # dtypes differ under autocast
        return torch.bmm(symmetric.view(rows, count, count).to(features_BFD.dtype), features_BFD)


def pairwise_dots(features: Tensor) -> Tensor:
    """Dot products of all pairs of features.

    Returns:
        (B, F (F - 1) / 2), pairs (0, 1), (0, 2), ... (1, 2), ...; differentiable twice.
    """
    return _PairwiseDots.apply(features)
