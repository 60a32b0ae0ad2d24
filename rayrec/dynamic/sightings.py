"""`Sightings`: the keys of a step; `Stamps`: when keys count as seen, where that is not now.

An id lives for as long as the longest time of the features that saw it. So an id that a feature of
a shorter time sees counts as seen earlier, by the difference to the time of the table, and never
earlier than it did before. One comparison then says for every id whether its time is over.

Until a step ends, the stamps of its keys are the step itself, by which no place of theirs is taken
back.
"""

# N keys

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from rayrec.dynamic.columns import Ints


class Sightings(NamedTuple):
    """Some different keys of a step.

    Attributes:
        keys: (N,).
        counts: (N,) how often they were seen in this step.
        stamps: (N,) steps, or seconds, at which they count as seen; None where that is now.
    """

    keys: Ints
    counts: Ints
    stamps: Ints | None = None

    @classmethod
    def counted(cls, keys: Ints, stamps: Ints | None) -> tuple[Sightings, Ints]:
        """Count (M,) keys of which some may be the same; the latest stamp of each counts.

        Returns:
            the different ones, and (M,) which of them each key is.
        """
        found = torch.unique(torch.from_numpy(keys), return_inverse=True, return_counts=True)
        different, inverse, counts = (part.numpy() for part in found)
        latest = None
        if stamps is not None:
            latest = np.full(len(different), np.iinfo(np.int64).min)
            np.maximum.at(latest, inverse, stamps)
        return cls(different, counts, latest), inverse

    def of(self, chosen: Any) -> Sightings:
        """Return some of them."""
        stamps = None if self.stamps is None else self.stamps[chosen]
        return Sightings(self.keys[chosen], self.counts[chosen], stamps)


class Stamps:
    """Stamps of a step that lie before it, which are written when it ends.

    Args:
        seen: column of the steps in which keys were seen.
        column: the one that is compared with the time to live; it may be `seen`.
    """

    def __init__(self, seen: Any, column: Any) -> None:
        self._seen, self._column = seen, column
        self._noted: list[tuple[Ints, Ints]] = []

    def later(self, places: Ints, stamps: Ints) -> Ints:
        """Return (N,) the later of the stamps of some places and of those that are given."""
        later: Ints = np.maximum(self._column[places], stamps)
        return later

    def note(self, places: Ints, stamps: Ints) -> None:
        """Note the stamps of (N,) places, of which the latest counts where one repeats."""
        self._noted.append((places, stamps))

    def settle(self, step: int) -> None:
        """Write what was noted, but for places that were given up in this step."""
        if not self._noted:
            return
        places, stamps = (np.concatenate(part) for part in zip(*self._noted, strict=True))
        self._noted = []
        held = self._seen[places] == step
        places, stamps = places[held], stamps[held]
        self._column[places] = np.iinfo(self._column.dtype).min
        np.maximum.at(self._column, places, stamps.astype(self._column.dtype))
