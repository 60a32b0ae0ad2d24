"""`SwishLayerNorm`: an activation that scales its input by a gate of the normalized input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """x * sigmoid(LayerNorm(x)); parameter names are TorchRec's (`norm.0.weight`).

    Args:
        input_dims: sizes of the last dimensions, over which is normalized; one number for the last.
    """

    def __init__(
        self, input_dims: int | Sequence[int], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        sizes = input_dims if isinstance(input_dims, int) else list(input_dims)
        self.norm = nn.Sequential(nn.LayerNorm(sizes, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """(..., *input_dims) -> the same shape."""
        return input * self.norm(input)
