"""`MemoryHere`: the named memory of sync points, without a keeper process."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rayrec.shards.named_memory import Memory


class MemoryHere(Memory):
    """Memory of this process, which outlives a model and not the process."""

    def __init__(self) -> None:
        self._pieces: dict[str, Tensor] = {}

    def take(self, name: str, size: int) -> Tensor:
        """Return a piece as it is, or zeros where it is new or of another size."""
        piece = self._pieces.get(name)
        if piece is None or piece.numel() != size:
            piece = self._pieces[name] = torch.zeros(size, dtype=torch.uint8)
        return piece

    def file(self, name: str, size: int) -> int:
        """Refuse: no other process sees this memory."""
        raise OSError(os.strerror(95))
