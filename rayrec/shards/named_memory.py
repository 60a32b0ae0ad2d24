"""Memory by name, which may outlive what uses it.

A rank takes its rows, their optimizer state and the log of its undo from a `Memory`. What takes the
same name and size again finds what was left there: after a failure a rank goes on with the rows of
the process before it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import torch
from torch import Tensor

SHARED = "shared"  # the piece with the rows that all ranks of a host read


class Memory(ABC):
    """Pieces of memory by name."""

    @abstractmethod
    def take(self, name: str, size: int) -> Tensor:
        """Return a piece as (size,) uint8: what lies there, or zeros where it is new.

        A piece of the same name and another size is dropped.
        """

    @abstractmethod
    def file(self, name: str, size: int) -> int:
        """Return the fd of a piece, which other processes can map; the caller closes it."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all pieces; what is mapped stays as long as somebody holds it."""

    def part(self, name: str) -> MemoryPart:
        """Return the pieces whose names begin with a name of its own."""
        return MemoryPart(self, name)


class MemoryPart(Memory):
    """Some pieces of a memory; see `Memory.part`."""

    def __init__(self, whole: Memory, name: str) -> None:
        self._whole, self._name, self._taken = whole, name, 0

    def take(self, name: str, size: int) -> Tensor:
        """Take the piece of the whole memory that has this part's name before its own."""
        return self._whole.take(f"{self._name}/{name}", size)

    def file(self, name: str, size: int) -> int:
        """Return the fd of that piece; the caller closes it."""
        return self._whole.file(f"{self._name}/{name}", size)

    def clear(self) -> None:
        """Refuse: pieces are dropped together."""
        raise AssertionError("clear the whole memory")

    def next(self, size: int) -> Tensor:
        """Take a piece whose name is the number of such calls before."""
        self._taken += 1
        return self.take(str(self._taken), size)


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

    def clear(self) -> None:
        """Drop all pieces."""
        self._pieces.clear()
