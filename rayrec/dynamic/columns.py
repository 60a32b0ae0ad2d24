"""`IdColumns`: what is known of the ids of a dynamic table, row by row."""

# P places

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.comm.pages import Allocate

NO_KEY = -1
Ints = NDArray[np.int64]


class IdColumns(NamedTuple):
    """What is known of every place, (P,) each.

    Attributes:
        key: int64, `NO_KEY` where the place is free.
        seen: int32, the step in which the key was last seen.
        hits: int32, how often it was seen since it has the place.
        time: int64, the time of the data in that step, since seconds of 32 bits end in 2038;
            `NO_TIME` where nobody knows it. None where the table does not ask for it.
    """

    key: Tensor
    seen: Tensor
    hits: Tensor
    time: Tensor | None = None

    @classmethod
    def lying_in(cls, allocate: Allocate, places: int, timed: bool) -> IdColumns:
        """Return columns in memory of somebody's: those that lie there, or of free places."""
        key = allocate(8 * places).view(torch.int64)
        seen, hits = (allocate(4 * places).view(torch.int32) for _ in range(2))
        time = allocate(8 * places).view(torch.int64) if timed else None
        is_made = allocate(8).view(torch.int64)
        if not is_made:
            key.fill_(NO_KEY)
            is_made.fill_(1)
        return cls(key, seen, hits, time)

    def part(self, start: int, stop: int) -> IdColumns:
        """Return the columns of some places, live."""
        return IdColumns(**{name: tensor[start:stop] for name, tensor in self.named().items()})

    def named(self) -> dict[str, Tensor]:
        """Return the columns that there are."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}

    def score(self, eviction: str) -> tuple[Ints, Ints]:
        """Return (P,) numbers by which keys are compared: first the last one, then the first."""
        seen, hits = self.seen.numpy(), self.hits.numpy()
        if eviction == "lfu":
            return seen, hits
        if eviction == "timestamp" and self.time is not None:
            return hits, self.time.numpy()
        return hits, seen
