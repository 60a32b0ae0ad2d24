"""A KJT as rows of bags: what `bucketize` makes, and what messages are cut from."""

# B bags of a feature, N ids

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor

from rayrec.sparse.ops import offsets_of


@dataclass(frozen=True)
class SourcePart:
    """Rows of bags that share one ids tensor.

    Attributes:
        ids: (N,) int64, row by row.
        counts: ids of each row.
        bags: bags of each row; 0 where lengths are not needed.
        lengths: (sum of bags,) int32.
        weights: (N,) float32, or None.
        origin: (N,) position of every id (and weight) in the KJT, or None when they are in place.
    """

    ids: Tensor
    counts: list[int]
    bags: list[int]
    lengths: Tensor
    weights: Tensor | None = None
    origin: Tensor | None = None


@dataclass(frozen=True)
class FilledBags:
    """Bags of cut features that have ids; the others stay at home.

    Attributes:
        bags: (source rows of bucketings that leave bags out, most bags of any) int64 numbers
            within their feature; behind the last one B.
        once: no bag has ids in two blocks. every: all bags have ids.
    """

    bags: Tensor
    once: bool
    every: bool


@dataclass(frozen=True)
class SourceRows:
    """The bags of a KJT as rows of bags, which can be sent.

    The KJT's own keys come first, then per bucketing blocks x features, block by block.

    Attributes:
        kjt_offsets: first id of each key. bag_offsets: first id of each bag, for who asks.
        filled: bags with ids, if bags without any stay at home.
    """

    parts: tuple[SourcePart, ...]
    kjt_offsets: list[int] = field(repr=False)
    bag_offsets: Callable[[], Tensor] = field(repr=False)
    filled: FilledBags | None = None

    @property
    def counts(self) -> list[int]:
        """Ids of every row."""
        return [count for part in self.parts for count in part.counts]

    @property
    def batch(self) -> int:
        """Bags of every key, where all have the same."""
        return self.parts[0].bags[0] if self.parts[0].bags else 0

    @property
    def most_bags(self) -> int:
        """The most bags of any key."""
        return max(self.parts[0].bags, default=0)

    @property
    def bags(self) -> list[int]:
        """Bags of every row."""
        return [bags for part in self.parts for bags in part.bags]

    @cached_property
    def _bounds(self) -> list[tuple[list[int], list[int]]]:
        return [(offsets_of(part.counts), offsets_of(part.bags)) for part in self.parts]

    def place_of(self, row: int) -> tuple[SourcePart, slice]:
        """Return the part that holds a row, and the row's ids among those of the part."""
        for part, (bounds, _) in zip(self.parts, self._bounds, strict=True):
            if row < len(part.counts):
                return part, slice(bounds[row], bounds[row + 1])
            row -= len(part.counts)
        raise AssertionError("the row does not exist")

    def runs_of(
        self, what: Literal["ids", "lengths", "weights"], wanted: Sequence[range]
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the values of runs of rows, one row after the other, and how many each row has.

        A run is cut where a part ends.
        """
        for run in wanted:
            first = 0
            for part, (id_bounds, bag_bounds) in zip(self.parts, self._bounds, strict=True):
                start, stop = max(run.start - first, 0), min(run.stop - first, len(part.counts))
                first += len(part.counts)
                if start < stop:
                    sizes, bounds = part.counts, id_bounds
                    if what == "lengths":
                        sizes, bounds = part.bags, bag_bounds
                    yield getattr(part, what)[bounds[start] : bounds[stop]], sizes[start:stop]
