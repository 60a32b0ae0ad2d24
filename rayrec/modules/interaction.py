"""Feature interactions: pairwise dot products (DLRM) and cross networks (DCN v2).

The dot interaction has a backward of its own: the product of a matrix with its transpose is symmetric, so the gradient is one gather of
the pairs into a symmetric matrix and one batched product, where autograd would scatter and multiply twice. Products with weights take the
faster of torch's two matrix libraries (`rayrec.modules.linear`). Parameter names of the cross networks are TorchRec's.

    # B rows, F features, D width, N columns of a cross network's input
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError
from rayrec.modules.linear import linear


@cache
def _pairs(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Flat positions of the pairs i < j in a (count, count) matrix, and for each cell of that matrix its pair (the diagonal: one past)."""
    rows, cols = torch.triu_indices(count, count, offset=1)
    pair_of = torch.full((count, count), len(rows))
    pair_of[rows, cols] = pair_of[cols, rows] = torch.arange(len(rows))
    return (rows * count + cols).to(device), pair_of.reshape(-1).to(device)


class _PairwiseDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_BFD: Tensor) -> Tensor:
        ctx.save_for_backward(features_BFD)
        positions, _ = _pairs(features_BFD.shape[1], features_BFD.device)
        return torch.bmm(features_BFD, features_BFD.transpose(1, 2)).flatten(1).index_select(1, positions)

    @staticmethod
    def backward(ctx: Any, grad_BP: Tensor) -> Tensor:
        (features_BFD,) = ctx.saved_tensors
        rows, count, _ = features_BFD.shape
        _, pair_of = _pairs(count, features_BFD.device)
        symmetric = functional.pad(grad_BP, (0, 1)).index_select(1, pair_of)  # the padded column is the diagonal's zero
        return torch.bmm(symmetric.view(rows, count, count).to(features_BFD.dtype), features_BFD)  # dtypes differ under autocast


def pairwise_dots(features: Tensor) -> Tensor:
    """Dot products of all pairs of features.

    Args:
        features: (B, F, D).
    Returns:
        (B, F (F - 1) / 2), pairs (0, 1), (0, 2), ... (1, 2), ...; differentiable twice.
    """
    return _PairwiseDots.apply(features)


def pairwise_dots_reference(features: Tensor) -> Tensor:
    """`pairwise_dots` with autograd's backward."""
    rows, cols = torch.triu_indices(features.shape[1], features.shape[1], offset=1)
    return torch.bmm(features, features.transpose(1, 2))[:, rows, cols]


class CrossNet(nn.Module):
    """x[l+1] = x[0] * (W[l] x[l] + b[l]) + x[l], with full square W: (B, N) -> (B, N).

    Args:
        in_features: N.
        num_layers: crossings.
        device: of the parameters.
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(torch.empty(in_features, in_features, device=device) for _ in range(num_layers))
        self.bias = nn.ParameterList(torch.empty(in_features, 1, device=device) for _ in range(num_layers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier normal kernels, zero biases."""
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            nn.init.xavier_normal_(kernel)
            nn.init.zeros_(bias)

    def forward(self, input: Tensor) -> Tensor:
        """(B, N) -> (B, N)."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, input, linear(crossed, kernel, bias.squeeze(1)))
        return crossed


class LowRankCrossNet(nn.Module):
    """x[l+1] = x[0] * (W[l] V[l] x[l] + b[l]) + x[l], with W (N, r) and V (r, N): (B, N) -> (B, N).

    Args:
        in_features: N.
        num_layers: crossings.
        low_rank: r; N / 4 about keeps the quality of the full matrix.
        device: of the parameters.
    Raises:
        ConfigError: low_rank is below 1.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1, device: torch.device | str | None = None) -> None:
        super().__init__()
        if low_rank < 1:
            raise ConfigError(f"low_rank={low_rank} must be at least 1.")
        self.W_kernels = nn.ParameterList(torch.empty(in_features, low_rank, device=device) for _ in range(num_layers))
        self.V_kernels = nn.ParameterList(torch.empty(low_rank, in_features, device=device) for _ in range(num_layers))
        self.bias = nn.ParameterList(torch.empty(in_features, device=device) for _ in range(num_layers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier normal kernels, zero biases."""
        for kernel in (*self.W_kernels, *self.V_kernels):
            nn.init.xavier_normal_(kernel)
        for bias in self.bias:
            nn.init.zeros_(bias)

    def forward(self, input: Tensor) -> Tensor:
        """(B, N) -> (B, N)."""
        crossed = input
        for wide, narrow, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, input, linear(linear(crossed, narrow), wide, bias))
        return crossed
