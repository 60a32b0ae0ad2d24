"""Memory by name, which may outlive what uses it.

A rank takes its rows, their optimizer state and the log of its undo from a `Memory`. What takes the
same name and size again finds what was left there: after a failure a rank goes on with the rows of
the process before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

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

    def next(self, size: int) -> Tensor:
        """Take a piece whose name is the number of such calls before."""
        self._taken += 1
        return self.take(str(self._taken), size)
