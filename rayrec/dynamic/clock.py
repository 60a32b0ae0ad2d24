"""`IdClock`: the steps by which ids grow old; `Dynamic`: what a kernel is told of its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayrec.layout.tables import BaseEmbeddingConfig


@dataclass(slots=True)
class IdClock:
    """Training steps of a collection, by which the ids of its dynamic tables grow old.

    All ranks have it, also those without a row of the tables.

    Attributes:
        steps: so far; a checkpoint carries it.
        trains: the step under way may give rows to ids and take them back.
    """

    steps: int = 0
    trains: bool = False

    def begin(self, trains: bool) -> None:
        """Begin a step, which counts where it trains."""
        self.trains = trains
        self.steps += trains


class Dynamic(NamedTuple):
    """Dynamic tables as their kernel gets them.

    Attributes:
        tables: of the shards of the kernel.
        seed: of first values and of the hash that admits a share of ids.
    """

    tables: tuple[BaseEmbeddingConfig, ...]
    seed: int
    clock: IdClock
