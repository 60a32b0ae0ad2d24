"""Some ranks of an exchange as a group of their own, among which shared memory can be opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rayrec.comm.exchange import Pending


class Gathers(Protocol):
    """Ranks that can gather tensors: all that `SharedMemoryExchange.open` needs of an exchange."""

    rank: int
    world_size: int

    def all_gather(self, send: Tensor, sizes: Sequence[int]) -> Pending[list[Tensor]]:
        """Gather `sizes[r]` elements from each rank r, as `Exchange.all_gather` does."""
        ...


def gather_numbers(over: Gathers, mine: Sequence[int]) -> list[list[int]]:
    """Return every rank's whole numbers, in rank order; all ranks give equally many."""
    sizes = [len(mine)] * over.world_size
    return [part.tolist() for part in over.all_gather(torch.tensor(mine), sizes).wait()]


class Members:
    """Some ranks of an exchange as a group that can gather tensors.

    All ranks of the exchange call together, and each takes what concerns it.
    """

    def __init__(self, whole: Gathers, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks
        self.rank, self.world_size = ranks.index(whole.rank), len(ranks)

    def all_gather(self, send: Tensor, sizes: Sequence[int]) -> Pending[list[Tensor]]:
        pending = self._whole.all_gather(send, [sizes[0]] * self._whole.world_size)
        return Pending(lambda: [pending.wait()[rank] for rank in self._ranks])
