"""Cross networks (DCN, DCN v2): learnt polynomials of a row of columns.

Products with weights take the faster of torch's two matrix libraries (`rayrec.modules.linear`).
Names of classes and parameters are TorchRec's.

    # B rows, N columns, r rank, K experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError
from rayrec.modules.linear import linear


def _kernels(count: int, *shape: int, device: torch.device | str | None) -> nn.ParameterList:
    return nn.ParameterList(torch.empty(*shape, device=device) for _ in range(count))


def _reset(kernels: Iterable[Tensor], biases: Iterable[Tensor]) -> None:
    for kernel in kernels:
        nn.init.xavier_normal_(kernel)
    for bias in biases:
        nn.init.zeros_(bias)


class CrossNet(nn.Module):
    """x[l+1] = x[0] * (W[l] x[l] + b[l]) + x[l], with full square W: (B, N) -> (B, N)."""

    def __init__(
        self, in_features: int, num_layers: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.kernels = _kernels(num_layers, in_features, in_features, device=device)
        self.bias = _kernels(num_layers, in_features, 1, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw kernels from Xavier's normal distribution, and set biases to zero."""
        _reset(self.kernels, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """(B, N) -> (B, N)."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, input, linear(crossed, kernel, bias.squeeze(1)))
        return crossed


class LowRankCrossNet(nn.Module):
    """x[l+1] = x[0] * (W[l] V[l] x[l] + b[l]) + x[l], with W (N, r) and V (r, N): (B, N) -> (B, N).

    Args:
        low_rank: r; N / 4 about keeps the quality of the full matrix.
    Raises:
        ConfigError: low_rank is below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        low_rank: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if low_rank < 1:
            raise ConfigError(f"low_rank={low_rank} must be at least 1.")
        self.W_kernels = _kernels(num_layers, in_features, low_rank, device=device)
        self.V_kernels = _kernels(num_layers, low_rank, in_features, device=device)
        self.bias = _kernels(num_layers, in_features, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw kernels from Xavier's normal distribution, and set biases to zero."""
        _reset((*self.W_kernels, *self.V_kernels), self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """(B, N) -> (B, N)."""
        crossed = input
        for wide, narrow, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, input, linear(linear(crossed, narrow), wide, bias))
        return crossed


class VectorCrossNet(nn.Module):
    """x[l+1] = x[0] (w[l] . x[l]) + b[l] + x[l], with one vector w (N, 1) per layer.

    (B, N) -> (B, N).

    Source: Wang et al. 2017, arXiv 1708.05123 (DCN).
    """

    def __init__(
        self, in_features: int, num_layers: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.kernels = _kernels(num_layers, in_features, 1, device=device)
        self.bias = _kernels(num_layers, in_features, 1, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw kernels from Xavier's normal distribution, and set biases to zero."""
        _reset(self.kernels, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """(B, N) -> (B, N)."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed + bias.squeeze(1), input, crossed @ kernel)
        return crossed


class LowRankMixtureCrossNet(nn.Module):
    """Low-rank crossings by K experts, mixed by gates: (B, N) -> (B, N).

    x[l+1] = sum over k of g[k] * e[k] + x[l], where
    e[k] = x[0] * (U[l,k] f(C[l,k] f(V[l,k] x[l])) + b[l]) and g = softmax over k of G[k] x[l].
    The gates G[k] are shared by the layers. With one expert there are no gates, and g is 1.

    Args:
        low_rank: r; V is (K, r, N), C (K, r, r), U (K, N, r).
    Raises:
        ConfigError: num_experts or low_rank is below 1.
    Source: Wang et al. 2020, arXiv 2008.13535 (DCN v2).
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_experts", num_experts), ("low_rank", low_rank)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        # Per layer and expert: V takes N columns to r, C stays in r, U takes r back to N.
        self.U_kernels = _kernels(num_layers, num_experts, in_features, low_rank, device=device)
        self.V_kernels = _kernels(num_layers, num_experts, low_rank, in_features, device=device)
        self.bias = _kernels(num_layers, in_features, 1, device=device)
        # A single expert has the whole weight, so it needs no gate.
        self.gates: nn.ModuleList | None = None
        if num_experts > 1:
            gates = (
                nn.Linear(in_features, 1, bias=False, device=device) for _ in range(num_experts)
            )
            self.gates = nn.ModuleList(gates)
        self._activation = activation
        self.C_kernels = _kernels(num_layers, num_experts, low_rank, low_rank, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier normal kernels, zero biases, torch's own initial values of the gates."""
        _reset((*self.U_kernels, *self.V_kernels, *self.C_kernels), self.bias)
        for gate in self.gates or ():
            assert isinstance(gate, nn.Linear)
            gate.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """(B, N) -> (B, N)."""
        crossed, f = input, self._activation
        layers = zip(self.V_kernels, self.C_kernels, self.U_kernels, self.bias, strict=True)
        for narrow_KrN, inner_Krr, wide_KNr, bias in layers:
            hidden_KBr = f(torch.matmul(crossed, narrow_KrN.transpose(1, 2)))
            hidden_KBr = f(torch.bmm(hidden_KBr, inner_Krr.transpose(1, 2)))
            wide_KBN = torch.bmm(hidden_KBr, wide_KNr.transpose(1, 2))
            experts_KBN = input * (wide_KBN + bias.squeeze(1))
            crossed = crossed + self._mix(experts_KBN, crossed)
        return crossed

    def _mix(self, experts_KBN: Tensor, crossed_BN: Tensor) -> Tensor:
        if self.gates is None:
            return experts_KBN[0]
        gates_KN = torch.cat(list(self.gates.parameters()))
        shares_BK = (crossed_BN @ gates_KN.t()).softmax(1)
        return torch.einsum("kbn,bk->bn", experts_KBN, shares_BK)
