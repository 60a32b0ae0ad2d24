"""The planted truth of synthetic clicks: what a seed decides, and the rows drawn from it.

The rows look like Criteo's: skewed ids (Zipf) over columns of its cardinalities scaled and capped,
list columns, dense columns. Each row's logit is b + signal * z, and z joins four standardized terms
by their shares of variance: one effect per id ("main"), an inner product of user and item factors
("low_rank"), a free table over two small columns ("cross"), a smooth function of the dense columns
("dense"). Rows are drawn in chunks, each a pure function of (config, part, chunk). With a
`lifetime` the rows are events in the order of time, evaluation last, and ids come and go
(`drifting`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayrec import checks
from rayrec.data.converted import one_table_per_column
from rayrec.data.drifting import Drift
from rayrec.data.hashing import mix, mix_int, permutation
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.schema import FeatureSchema

F64 = NDArray[np.float64]
CHUNK = 65_536  # rows that are drawn at a time
_REFERENCE = 2  # the part that standardizes the terms; 0 and 1 are train and eval
# distinct values of C1..C26 in Criteo's Kaggle set
_CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    """The rows to draw, and the truth to plant in them.

    Attributes:
        rows_train, rows_eval: rows of the two sets.
        num_features: sparse columns, the last `num_lists` of them lists of 0 to 4 ids; at least 4.
        cap: most ids of a column; Criteo's cardinalities, repeated for more than 26 columns, are
            cut to it.
        signal: standard deviation of the true logits; 1.65 makes a Bayes AUC near 0.84.
        base_rate: share of clicks.
        low_rank, cross, dense: shares of the logit's variance; the main effects have the rest.
        lifetime: rows for which an id lives; ids are then numbers of 64 bits, of which a column
            has at most `cap` at a time, and tables are dynamic. None keeps ids for ever.
        shuffle_labels: permute labels over the rows of each chunk.
    Raises:
        ConfigError: a value out of range.
    """

    rows_train: int = 1_500_000
    rows_eval: int = 100_000
    num_features: int = 26
    num_lists: int = 2
    num_dense: int = 13
    dim: int = 16
    cap: int = 2000
    signal: float = 1.65
    base_rate: float = 0.25
    low_rank: float = 0.05
    cross: float = 0.05
    dense: float = 0.15
    lifetime: int | None = None
    shuffle_labels: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        least = {"rows_train": 1, "rows_eval": 2, "num_features": 4, "num_lists": 0}
        least |= {"num_dense": 0, "dim": 4, "cap": 10}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be at least {low}.")
        if self.lifetime is not None:
            checks.whole_number("lifetime", self.lifetime, 1, 1 << 62)
        # The truth needs a user, an item and two small columns of single ids.
        if self.num_lists > self.num_features - 4:
            raise ConfigError(
                f"num_lists={self.num_lists} of num_features={self.num_features}; four columns "
                "must hold single ids."
            )
        if not 0 < self.base_rate < 1:
            raise ConfigError(f"base_rate={self.base_rate}; it must lie between 0 and 1.")
        shares = self.low_rank, self.cross, self.dense
        if min(shares) < 0 or sum(shares) > 1:
            raise ConfigError(
                "the shares low_rank, cross and dense must not be negative and sum to at most 1."
            )


class Ids(NamedTuple):
    """One column of one chunk: row i holds values[offsets[i]:offsets[i + 1]].

    Without `offsets`, row i holds values[i].
    """

    values: NDArray[np.int64]
    offsets: NDArray[np.int32] | None


class Rows(NamedTuple):
    """One chunk of rows with their true logits."""

    dense: NDArray[np.float32]
    ids: list[Ids]
    labels: NDArray[np.int8]
    logits: F64


class Planted:
    """The truth: all that `config.seed` decides, and the rows drawn from it."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        n = config.num_features
        sizes = self.cardinalities = [min(_CRITEO[f % 26], config.cap) for f in range(n)]
        # the two largest columns of single ids are the user and the item
        by_size = sorted(range(n - config.num_lists), key=lambda f: (-_CRITEO[f % 26], f))
        self.user, self.item = by_size[:2]
        near_20 = sorted(by_size[2:], key=lambda f: abs(math.log(sizes[f] / 20)))
        self.small = tuple(near_20[:2])
        self._popular = [
            permutation(mix_int(config.seed, 2, f), size) for f, size in enumerate(sizes)
        ]
        # one stream of numbers: the order of the draws below is part of the data's definition
        rng = np.random.Generator(np.random.Philox(mix_int(config.seed, 1)))
        self._cdf = [_zipf_cdf(size, rng.uniform(1.05, 1.2)) for size in sizes]
        self._effects = [rng.standard_normal(size) * size**-0.3 for size in sizes]
        self._factors = [rng.standard_normal((sizes[f], 2)) for f in (self.user, self.item)]
        self._cross = rng.standard_normal([sizes[f] for f in self.small])
        self._linear, self._curved = rng.standard_normal((2, config.num_dense))
        lifetime = config.lifetime
        self._drift = None if lifetime is None else Drift(config.seed, lifetime, sizes)
        self._means, self._stds, self.bias = np.zeros(4), np.ones(4), 0.0
        dense, ids = self._draw(_REFERENCE, 0, CHUNK)
        terms = self._terms(dense, ids)
        self._means, self._stds = terms.mean(1), np.where(terms.std(1) > 0, terms.std(1), 1.0)
        z = self._z(dense, ids)
        self._z_std = max(float(z.std()), 1e-9)
        self.bias = _bias(config.signal * z / self._z_std, config.base_rate)

    def chunk(self, part: int, index: int, rows: int) -> Rows:
        """Rows of one chunk; a pure function of the config and the arguments."""
        dense, ids = self._draw(part, index, rows)
        logits = self.bias + self.config.signal * self._z(dense, ids) / self._z_std
        rng = np.random.Generator(np.random.Philox(mix_int(self.config.seed, 4, part, index)))
        labels = (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int8)
        if self.config.shuffle_labels:
            labels = labels[permutation(mix_int(self.config.seed, 5, part, index), rows)]
        return Rows(dense, ids, labels, logits)

    def _draw(self, part: int, index: int, rows: int) -> tuple[NDArray[np.float32], list[Ids]]:
        # The features of one chunk: dense columns (rows, num_dense), and one `Ids` per sparse
        # column. A column of single ids has one id in a row, a list column has 0 to 4. The 3 behind
        # the seed keeps these numbers apart from those of the labels and of the truth.
        rng = np.random.Generator(np.random.Philox(mix_int(self.config.seed, 3, part, index)))
        dense = rng.standard_normal((rows, self.config.num_dense), dtype=np.float32)
        ids, times = [], self._times(part, index, rows)
        for f, (cdf, popular) in enumerate(zip(self._cdf, self._popular, strict=True)):
            offsets, n = None, rows
            if f >= self.config.num_features - self.config.num_lists:
                ends = np.cumsum(rng.integers(0, 5, rows))
                offsets = np.concatenate([[0], ends]).astype(np.int32)
                n = int(offsets[-1])
            # The inverse of the Zipf law gives a rank of popularity; `popular` says which id has
            # that rank.
            values = popular[np.searchsorted(cdf, rng.random(n), side="right")]
            if self._drift is not None:
                of_ids = times if offsets is None else np.repeat(times, np.diff(offsets))
                values = self._drift.ids(f, values, of_ids)
            ids.append(Ids(values, offsets))
        return dense, ids

    def _times(self, part: int, index: int, rows: int) -> NDArray[np.int64]:
        """(rows,) the places of the rows of a chunk in the order of time."""
        c, numbers = self.config, np.arange(rows, dtype=np.int64)
        if part == _REFERENCE:
            # over all times, as no generation of ids shall decide on the size of a term
            return numbers * max(1, (c.rows_train + c.rows_eval) // rows)
        return numbers + index * CHUNK + part * c.rows_train

    def _terms(self, dense: NDArray[np.float32], ids: list[Ids]) -> F64:
        """(4, rows): main, low rank, cross and dense terms, not yet standardized."""
        main = np.zeros(len(dense))
        for f, column in enumerate(ids):
            main += _bag_means(self._effects_of(f, column.values), column.offsets)
        user, item, cross = self._pairs(ids)
        bent = np.tanh(dense.astype(np.float64)) ** 2
        smooth = _times(dense, self._linear) + 0.5 * _times(bent, self._curved)
        return np.stack([main, (user * item).sum(1), cross, smooth])

    def _effects_of(self, f: int, ids: NDArray[np.int64]) -> F64:
        """(N,) main effects of (N,) ids of a column."""
        if self._drift is None:
            return self._effects[f][ids]
        return self._drift.normals(f, ids) * self.cardinalities[f] ** -0.3

    def _pairs(self, ids: list[Ids]) -> tuple[F64, F64, F64]:
        """(rows, 2) factors of users and of items, and (rows,) values of the crossed columns."""
        user, item, *small = (ids[f].values for f in (self.user, self.item, *self.small))
        if self._drift is None:
            return self._factors[0][user], self._factors[1][item], self._cross[small[0], small[1]]
        n, normals = len(ids), self._drift.normals
        factors = [np.stack([normals(n, who), normals(n + 1, who)], 1) for who in (user, item)]
        both = mix(small[0].view(np.uint64)) ^ small[1].view(np.uint64)
        return factors[0], factors[1], normals(n + 2, both.view(np.int64))

    def _z(self, dense: NDArray[np.float32], ids: list[Ids]) -> F64:
        # (rows,) the sum of the standardized terms. A term times the root of its share has that
        # share as its variance.
        c = self.config
        main = 1 - c.low_rank - c.cross - c.dense
        share = np.array([main, c.low_rank, c.cross, c.dense if c.num_dense else 0.0])
        terms = (self._terms(dense, ids) - self._means[:, None]) / self._stds[:, None]
        return _times(terms.T, np.sqrt(share))

    def schema(self) -> FeatureSchema:
        """Schema of the written columns: one table per column; lists are mean-pooled."""
        names = [f"cat_{f}" for f in range(self.config.num_features)]
        lists = names[self.config.num_features - self.config.num_lists :]
        sizes = dict(zip(names, self.cardinalities, strict=True))
        dense = [f"d_{i}" for i in range(self.config.num_dense)]
        rule = None
        if self.config.lifetime is not None:
            # the dead leave their rows when others need them, so there is room for both
            sizes, rule = {name: 2 * size for name, size in sizes.items()}, DynamicConfig()
        return one_table_per_column(sizes, self.config.dim, dense=dense, means=lists, dynamic=rule)


def _zipf_cdf(size: int, exponent: float) -> F64:
    weights = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    cdf = np.cumsum(weights)
    cdf /= cdf[-1]
    cdf[-1] = 1.0
    return cdf


def _times(matrix: NDArray[np.floating[Any]], vector: F64) -> F64:
    """(n, k) times (k,) on this thread alone.

    OpenBLAS, behind `@`, stops its threads when any thread forks, as Ray's start does; a product
    under way then never ends.
    """
    products: F64 = np.einsum("nk,k->n", matrix, vector)
    return products


def _bag_means(values: F64, offsets: NDArray[np.int32] | None) -> F64:
    """Mean of each bag's values; 0 for an empty bag."""
    if offsets is None:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[offsets[1:]] - sums[offsets[:-1]]) / np.maximum(np.diff(offsets), 1)


def _bias(logits: F64, base_rate: float) -> float:
    """The bias that makes the mean click probability `base_rate`, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.mean(1 / (1 + np.exp(-logits - middle))) < base_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
