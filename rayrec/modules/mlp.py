"""`Perceptron` and `MLP`: linear layers, each followed by an activation.

Parameter names are TorchRec's (`_mlp.0._linear.weight`). The layers are `FastLinear`: nn.Linear
with the faster of torch's two matrix libraries (`rayrec.modules.linear`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError
from rayrec.modules.activation import SwishLayerNorm
from rayrec.modules.linear import FastLinear

Activation = Callable[[Tensor], Tensor]
_BY_NAME: dict[str, Activation] = {"relu": torch.relu, "sigmoid": torch.sigmoid}


class Perceptron(nn.Module):
    """One linear layer and its activation: (B, in_size) -> (B, out_size)."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = FastLinear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def reset_parameters(self) -> None:
        """Draw torch's own initial values of a linear layer."""
        self._linear.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """(B, in_size) -> (B, out_size)."""
        if self._activation_fn is torch.relu and type(self._linear) is FastLinear:
            return self._linear.forward_relu(input)
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """A stack of perceptrons: (B, in_size) -> (B, layer_sizes[-1]).

    Args:
        layer_sizes: columns after each layer; [] gives the identity.
        activation: "relu", "sigmoid", "swish_layernorm", a function or module (shared by the
            layers), or a class or function without arguments that makes a module per layer.
        activation_on_last: True gives the last layer the activation as well.
    Raises:
        ConfigError: the activation's name is unknown.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: str | Activation | Callable[[], nn.Module] = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        layers = []
        for index, sizes in enumerate(pairwise([in_size, *layer_sizes])):
            active = activation_on_last or index < len(layer_sizes) - 1
            function: Activation = nn.Identity()
            if active and activation == "swish_layernorm":
                function = SwishLayerNorm(sizes[1], device).to(dtype)
            elif active:
                function = _resolve(activation)
            layers.append(Perceptron(*sizes, bias, function, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def reset_parameters(self) -> None:
        """Draw torch's own initial values of every layer."""
        for layer in self._mlp:
            assert isinstance(layer, Perceptron)
            layer.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """(B, in_size) -> (B, layer_sizes[-1])."""
        return self._mlp(input)


def _resolve(activation: str | Activation | Callable[[], nn.Module]) -> Activation:
    if isinstance(activation, str):
        if activation not in _BY_NAME:
            raise ConfigError(
                f"activation {activation!r} is unknown; use one of "
                f"{sorted([*_BY_NAME, 'swish_layernorm'])}, a function or a module."
            )
        return _BY_NAME[activation]
    return activation() if _makes_modules(activation) else activation  # type: ignore


def _makes_modules(activation: Any) -> bool:
    """Return True if it is a module's class, or can be called without a tensor as a class can."""
    if isinstance(activation, type | nn.Module):
        return isinstance(activation, type)
    try:
        inspect.signature(activation).bind()
    except (TypeError, ValueError):  # it wants a tensor, or is torch's own and tells nothing
        return False
    return True
