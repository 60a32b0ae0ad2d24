"""`IdColumns`: what is known of the ids of a dynamic table, row by row."""

# P places, L lanes

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain, count, takewhile
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
        # side by side, since a step asks memory for both
        seen, hits = allocate(8 * places).view(torch.int32).view(places, 2).unbind(1)
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

    def in_lanes(self, kind: str, lanes: int) -> dict[str, Tensor]:
        """Return the columns as those of L lanes by name, live: lane l has every L-th place from l
        on, so that a row has a place in each.
        """
        names = [name for name, _ in zip(_lane_names(kind), range(lanes), strict=False)]
        return {
            f"{name}_{column}": tensor[lane::lanes]
            for lane, name in enumerate(names)
            for column, tensor in self.named().items()
        }

    @classmethod
    def of_lanes(cls, kind: str, columns: Mapping[str, Tensor]) -> IdColumns | None:
        """Return the columns of all lanes of a kind, copied where there are several; None without
        any.
        """
        lanes = lanes_of(kind, columns)
        parts = {
            column: [columns[f"{lane}_{column}"] for lane in lanes]
            for column in cls._fields
            if f"{kind}_{column}" in columns
        }
        whole = {
            column: of_lanes[0] if len(lanes) == 1 else torch.stack(of_lanes, 1).view(-1)
            for column, of_lanes in parts.items()
        }
        return cls(**whole) if whole else None

    def score(self, eviction: str) -> tuple[Ints, Ints]:
        """Return (P,) numbers by which keys are compared: first the last one, then the first."""
        seen, hits = self.seen.numpy(), self.hits.numpy()
        if eviction == "lfu":
            return seen, hits
        if eviction == "timestamp" and self.time is not None:
            return hits, self.time.numpy()
        return hits, seen


def lanes_of(kind: str, columns: Collection[str]) -> list[str]:
    """Return the names of the lanes of a kind of places, of which columns are given by name."""
    return list(takewhile(lambda name: f"{name}_key" in columns, _lane_names(kind)))


def _lane_names(kind: str) -> Iterator[str]:
    return chain([kind], (f"{kind}_{number}" for number in count(1)))
