"""Tallies of a stream of rows in bounded memory: a count with examples, the largest, a histogram.

The histogram is that of the upper bits of float32 numbers, so each power of two has eight bins, and
a bin is found by a shift. What is read from it, such as a median, is the lower end of a bin: at
most an eighth too small. Counts are exact.
"""

# N values of a part

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXAMPLES = 3
LARGEST = 100
_SHIFT = 20  # leaves the exponent and three bits of the mantissa
_BINS = 1 << (31 - _SHIFT)


@dataclass(slots=True)
class ExampleCount:
    """A number of rows, and the first of them by name."""

    count: int = 0
    examples: list[int] = field(default_factory=list)

    def add(self, names: Tensor) -> None:
        """Count (N,) rows."""
        self.count += len(names)
        self.examples += names[: EXAMPLES - len(self.examples)].tolist()


class LargestValues:
    """The rows of the largest values, and the sum of all values."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.values = torch.empty(0, dtype=torch.float64)
        self.names = torch.empty(0, dtype=torch.int64)

    def add(self, values: Tensor, names: Tensor) -> None:
        """Take the (N,) values of some rows."""
        self.sum += float(values.sum(dtype=torch.float64))
        if len(self.values) == LARGEST:
            (above,) = (values > self.values[-1]).nonzero(as_tuple=True)
            values, names = values[above], names[above]
        both = torch.cat([self.values, values.double()])
        self.values, order = both.topk(min(LARGEST, len(both)))
        self.names = torch.cat([self.names, names])[order]

    def share(self, count: int) -> float | None:
        """Return the share of the largest `count` values in the sum; None without any."""
        return float(self.values[:count].sum()) / self.sum if self.sum > 0 else None


class Float32Histogram:
    """Counts of positive float32 numbers."""

    def __init__(self) -> None:
        self._counts = torch.zeros(_BINS, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Count (N,) float32 numbers of at least 0."""
        self._counts += torch.bincount(values.view(torch.int32) >> _SHIFT, minlength=_BINS)

    def quantile(self, share: float) -> float | None:
        """Return a number that so many of all are about below; None without any."""
        total = int(self._counts.sum())
        if not total:
            return None
        rank = min(total, math.floor(share * total) + 1)
        return _lower_end(int(torch.searchsorted(self._counts.cumsum(0), rank)))

    def from_about(self, limit: float) -> tuple[int, float]:
        """Return how many numbers lie in the bin of a limit or above it, and where the bin begins.

        Args:
            limit: above 0.
        """
        number = int(torch.tensor(limit, dtype=torch.float32).view(torch.int32)) >> _SHIFT
        return int(self._counts[number:].sum()), _lower_end(number)

    def octaves(self) -> dict[int, int]:
        """Return the exponent of each power of two -> how many numbers lie from it to the next."""
        counts = self._counts.view(-1, 8).sum(1)
        return {int(i) - 127: int(counts[i]) for i in counts.nonzero()[:, 0]}


def _lower_end(number: int) -> float:
    return float(torch.tensor(number << _SHIFT, dtype=torch.int32).view(torch.float32))
