"""`FeatureBags`: the bags of a batch in the order in which a lookup wants them, checked.

# B rows of the batch, F features, N ids of all features
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.errors import ConfigError, InputError
from rayrec.sparse import KeyedJaggedTensor, UnknownKeyError, check_ids, check_kjt

_UNSIGNED = {torch.int64: np.uint64, torch.int32: np.uint32}
_MOST_KEPT = 16
_CHECKED = "rayrec.quant: ids and offsets are right"


def mark_checked(batch: KeyedJaggedTensor) -> None:
    """Mark a batch whose offsets are sound and whose ids all lie in the tables to be read.

    Lookups then do not check it again. Whatever is made of the batch is checked.
    """
    batch.carried[_CHECKED] = True


class FeatureBags(NamedTuple):
    """Ids of F features, one after another.

    Attributes:
        ids: (N,) int32 or int64.
        offsets: (F B + 1,).
        weights: (N,) float32, or None.
        rows: B.
        features: F.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    rows: int
    features: int

    def counts(self) -> list[int]:
        """Ids of each feature."""
        if not self.rows:
            return [0] * self.features
        cuts: NDArray[Any] = self.offsets.numpy()[:: self.rows]
        return np.diff(cuts).tolist()


class OneEach(NamedTuple):
    """Bags of one id each, as most features of click data have, for some number of rows.

    Attributes:
        lengths: the bytes of their lengths, by type.
        offsets: (F B + 1,) int64, which nobody writes to.
        ends: the bytes of the offsets.
        limits: (F B,) the rows of the table that each id reads.
    """

    lengths: dict[torch.dtype, bytes]
    offsets: Tensor
    ends: bytes
    limits: NDArray[np.uint64]

    @classmethod
    def of(cls, rows: int, limits: NDArray[np.uint64]) -> OneEach:
        """Make it for `rows` rows of features whose tables have `limits` rows."""
        ends = np.arange(rows * len(limits) + 1, dtype=np.int64)
        ones = torch.ones(rows * len(limits), dtype=torch.int64)
        lengths = {kind: ones.to(kind).numpy().tobytes() for kind in _UNSIGNED}
        return cls(lengths, torch.from_numpy(ends), ends.tobytes(), limits.repeat(rows))


class BagReader:
    """Takes the bags of some features from batches.

    Args:
        tables: name and rows of the table of each feature.
        features: names, in the order of the lookup; a feature may occur for several tables.
        is_weighted: True if ids have weights.
    """

    def __init__(
        self, tables: Sequence[tuple[str, int]], features: Sequence[str], is_weighted: bool
    ) -> None:
        self._tables, self._is_weighted = tables, is_weighted
        self.keys = self._features = list(features)
        self._limits = np.array([rows for _, rows in tables], np.uint64)
        self._is_plain = len(set(self._features)) == len(self._features)
        self._ones: dict[int, OneEach] = {}

    def read(self, batch: KeyedJaggedTensor) -> FeatureBags:
        """The bags in the order of the features; without a copy where the batch has that order.

        Every id and offset is looked at, unless the batch went through `mark_checked`.

        Args:
            batch: a batch on the CPU that has one number of bags for all keys.
        Raises:
            UnknownKeyError: the batch misses a feature.
            InputError: an id lies outside its table, or weights are missing.
            ShapeError: lengths, offsets, ids and weights do not fit each other.
            ConfigError: the batch is on another device.
        """
        check = _CHECKED not in batch.carried
        if not self._is_plain or batch.keys() != self._features:
            if check:
                check_kjt(batch)
            index = batch.index_per_key()
            for feature in self._features:
                if feature not in index:
                    raise UnknownKeyError(
                        f"no key {feature!r} in this KeyedJaggedTensor; it has {batch.keys()}."
                    )
            batch = batch.permute([index[feature] for feature in self._features])
        ids, rows, weights = batch.values(), batch.stride(), None
        if not ids.is_cpu:
            raise ConfigError(
                f"the batch is on {ids.device}, and packed tables are looked up on the CPU; move "
                "it with .to('cpu')."
            )
        if self._is_weighted:
            weights = batch.weights()
            # weights may be learned, but packed tables have no backward pass
            weights = weights.detach().float().contiguous()
        if ids.dtype not in _UNSIGNED:
            ids = ids if ids.is_floating_point() and ids.numel() else ids.long()
        # a batch that is not checked has its offsets taken as they are
        is_known = not check and batch.offsets_or_none() is not None
        one_each = None if is_known else self._one_each(batch, rows)
        offsets = batch.offsets() if one_each is None else one_each.offsets
        if check and not self._is_sound(ids, offsets, weights, rows, one_each):
            self._blame(batch)
        # the operator reads whatever lies beside a number, as in a column of a matrix
        return FeatureBags(
            ids.contiguous(), offsets.contiguous(), weights, rows, len(self._features)
        )

    def _one_each(self, batch: KeyedJaggedTensor, rows: int) -> OneEach | None:
        """Return the prepared bags if each bag of the batch holds one id, else None.

        Most features of click data have one id a row. To compare their lengths with ones is quicker
        than to make offsets of them and to look at those: one row then takes a third less time.
        """
        bags = rows * len(self._limits)
        if not bags or batch.values().shape != (bags,):
            return None
        known = self._ones.get(rows)
        if known is None:
            if len(self._ones) >= _MOST_KEPT:
                self._ones.clear()
            known = self._ones[rows] = OneEach.of(rows, self._limits)
        given = batch.offsets_or_none()
        if given is None:
            lengths = batch.lengths()
            is_one_each = known.lengths.get(lengths.dtype) == lengths.numpy().tobytes()
        else:
            ends: NDArray[Any] = given.numpy()
            is_one_each = ends.astype(np.int64, copy=False).tobytes() == known.ends
        return known if is_one_each else None

    def _is_sound(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        rows: int,
        one_each: OneEach | None,
    ) -> bool:
        """Return True if every id lies in its table and offsets run from 0 to the number of ids."""
        if ids.dtype not in _UNSIGNED or ids.dim() != 1:
            return False
        if weights is not None and weights.shape != ids.shape:
            return False
        values: NDArray[Any] = ids.numpy()
        # seen as unsigned, a negative id is above every limit
        unsigned = values.view(_UNSIGNED[ids.dtype])
        if one_each is not None:
            return np.count_nonzero(unsigned >= one_each.limits) == 0
        ends: NDArray[Any] = offsets.numpy()
        if len(ends) != rows * len(self._limits) + 1 or ends[0] != 0 or ends[-1] != len(values):
            return False
        if not rows:
            return True
        if rows > 1 and np.count_nonzero(ends[1:] < ends[:-1]):
            return False
        cuts = ends[::rows]
        try:
            limits = self._limits.repeat(cuts[1:] - cuts[:-1])
        # a negative number of ids
        except ValueError:
            return False
        return np.count_nonzero(unsigned >= limits) == 0

    def _blame(self, batch: KeyedJaggedTensor) -> None:
        """Raise what is wrong with a batch in the order of the features."""
        plain = batch
        if not self._is_plain:
            keys = list(dict.fromkeys(self._features))
            plain = batch.permute([self._features.index(key) for key in keys])
        check_kjt(plain)
        for (table, limit), feature in zip(self._tables, self._features, strict=True):
            check_ids(plain, {feature: limit}, f"the lookup of table {table!r}")
        raise InputError(
            f"the batch of keys {plain.keys()[:5]} has lengths, offsets and ids that do not fit "
            "each other; build it from values and lengths alone."
        )
