"""Collections that are read in place, as a rank reads them for its batch: what they share.

Every rank maps the rows of all shards (`TableSpace`). So the forward pass is a local lookup of the
ids of this rank's KJT, and no row travels. For the backward pass `joined` says where the gradients
of this rank's outputs belong in a matrix that the owners of the rows read (`in_place`). Pooled
collections are in `home_lookup`, sequences in `home_sequence`.
"""

# B rows of the home batch, D columns of a collection, N ids

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import Use
from rayrec.distributed.steps.source_rows import SourceRows

Keys = tuple[str, ...]


class Wanted(NamedTuple):
    """Ids of a batch that its home rank looks up.

    Attributes:
        ids: the bags of every slot of a pooled collection; one bag per id of a sequence.
        counts: number of ids of each use of a sequence; empty for a pooled collection.
        absent: of a sequence of dynamic tables, (N,) ids without a row; else None.
    """

    ids: GroupIds
    counts: list[int]
    absent: Tensor | None = None


class Home(Protocol):
    """One collection, for all its uses.

    Attributes:
        uses: the uses of the collection, in output order.
        width: D, the columns of the matrix that its gradients make.
        weighted: True if ids have weights.
    """

    uses: tuple[Use, ...]
    width: int
    weighted: bool

    def wanted(self, rows: SourceRows, keys: Keys, of_uses: Sequence[Tensor] = ()) -> Wanted:
        """Return what is to be looked up of a batch with these keys.

        Args:
            of_uses: per use, the rows of its ids, `ABSENT` where one has none; empty where ids are
                rows.
        """
        ...

    def look_up(self, wanted: Wanted, bags: Mapping[str, int]) -> list[Tensor]:
        """Return the outputs; `bags` has the bags of every feature, if they differ."""
        ...

    def joined(self, grads: Sequence[Tensor], most_bags: int) -> list[tuple[int, int, Tensor]]:
        """Return the gradients of the outputs as parts of one matrix of D columns.

        Args:
            grads: per output, (bags or ids, its columns).
            most_bags: the rows of the matrix of a pooled collection.
        Returns:
            (first row, first column, values) of each part; the parts cover the matrix.
        """
        ...

    def grad_of_weights(
        self, grads: Sequence[Tensor], wanted: Wanted, rows: SourceRows, keys: Keys, total: Tensor
    ) -> None:
        """Add the gradient of the KJT's weights to `total`, (N,) in the order of the KJT."""
        ...


class Features:
    """Positions among a batch's keys of the features that slots read."""

    def __init__(self, features: Sequence[str]) -> None:
        self._features = features
        self._orders: dict[Keys, tuple[int, ...]] = {}

    def order(self, keys: Keys) -> tuple[int, ...]:
        if keys not in self._orders:
            where = {key: i for i, key in enumerate(keys)}
            self._orders[keys] = tuple(where[feature] for feature in self._features)
        return self._orders[keys]


def fill(matrix: Tensor, parts: Sequence[tuple[int, int, Any]], scale: float) -> None:
    """Put the parts of a matrix in place, times `scale`, in one pass."""
    for row, column, part in parts:
        _put_scaled(part, scale, matrix[row : row + part.shape[0], column : column + part.shape[1]])


def _put_scaled(values: Tensor, scale: float, out: Tensor) -> None:
    """Write values * scale to `out`, of the same shape.

    The gradient of a sum is one number that is expanded, with strides of 0, and torch does not
    vectorize its product. So the number itself is scaled and then copied.
    """
    if 0 in values.stride() and values.numel():
        once = values[
            tuple(slice(0, 1) if stride == 0 else slice(None) for stride in values.stride())
        ]
        out.copy_((once * scale).expand_as(out))
    else:
        torch.mul(values, scale, out=out)
