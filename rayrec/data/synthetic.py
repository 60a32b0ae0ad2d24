"""Click data with planted truth: every row's click probability, and the best score, are known.

The rows look like Criteo's: skewed ids (Zipf) over columns of its cardinalities scaled and capped,
list columns, dense columns. Each row's logit is b + signal * z, and z joins four standardized terms
by their shares of variance: one effect per id ("main"), an inner product of user and item factors
("low_rank"), a free table over two small columns ("cross"), a smooth function of the dense columns
("dense"). Rows are drawn in chunks, each a pure function of (config, part, chunk), and written as
they come: memory is one chunk. `truth.json` states the scores of the true probabilities on the
evaluation rows; `shuffle_labels` breaks the tie between rows and labels, after which any model that
scores other than chance has seen the future.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rayrec.data.hashing import mix_int, permutation
from rayrec.errors import ConfigError
from rayrec.layout.schema import DenseColumn, Feature, FeatureSchema
from rayrec.layout.tables import EmbeddingBagConfig, PoolingType
from rayrec.layout.units import format_bytes

F64 = NDArray[np.float64]
CHUNK = 65_536
_TRAIN, _EVAL, _REFERENCE = range(3)
# distinct values of C1..C26 in Criteo's Kaggle set
_CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    """What to plant.

    Attributes:
        rows_train, rows_eval: rows of the two sets.
        num_features: sparse columns, the last `num_lists` of them lists of 0 to 4 ids; at least 4.
        num_dense: dense columns.
        dim: width of every table in the schema.
        cap: most ids of a column; Criteo's cardinalities, repeated for more than 26 columns, are
            cut to it.
        signal: standard deviation of the true logits; 1.65 makes a Bayes AUC near 0.84.
        base_rate: share of clicks.
        low_rank, cross, dense: shares of the logit's variance; the main effects have the rest.
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
    shuffle_labels: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "rows_train": 1,
            "rows_eval": 2,
            "num_features": 4,
            "num_lists": 0,
            "num_dense": 0,
            "dim": 4,
            "cap": 10,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be at least {low}.")
        if self.num_lists > self.num_features - 4:
            raise ConfigError(
                f"num_lists={self.num_lists} of num_features={self.num_features}; four columns "
                "must hold single ids."
            )
        if not 0 < self.base_rate < 1:
            raise ConfigError(f"base_rate={self.base_rate}; it must lie between 0 and 1.")
        if (
            min(self.low_rank, self.cross, self.dense) < 0
            or self.low_rank + self.cross + self.dense > 1
        ):
            raise ConfigError(
                "the shares low_rank, cross and dense must not be negative and sum to at most 1."
            )


class SyntheticPaths(NamedTuple):
    """Where `write_synthetic` wrote."""

    train: Path
    eval: Path
    schema: Path
    truth: Path


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
        self.cardinalities = [min(_CRITEO[f % 26], config.cap) for f in range(n)]
        singles = n - config.num_lists
        by_size = sorted(range(singles), key=lambda f: (-_CRITEO[f % 26], f))
        self.user, self.item = by_size[:2]
        self.small = tuple(
            sorted(by_size[2:], key=lambda f: abs(math.log(self.cardinalities[f] / 20)))[:2]
        )
        rng = np.random.Generator(np.random.Philox(mix_int(config.seed, 1)))
        self._popular = [
            permutation(mix_int(config.seed, 2, f), size)
            for f, size in enumerate(self.cardinalities)
        ]
        self._cdf = [_zipf_cdf(size, rng.uniform(1.05, 1.2)) for size in self.cardinalities]
        self._effects = [rng.standard_normal(size) * size**-0.3 for size in self.cardinalities]
        self._factors = [
            rng.standard_normal((self.cardinalities[f], 2)) for f in (self.user, self.item)
        ]
        self._cross = rng.standard_normal([self.cardinalities[f] for f in self.small])
        self._linear, self._curved = rng.standard_normal((2, config.num_dense))
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
        rng = np.random.Generator(np.random.Philox(mix_int(self.config.seed, 3, part, index)))
        dense = rng.standard_normal((rows, self.config.num_dense), dtype=np.float32)
        ids = []
        for f, (cdf, popular) in enumerate(zip(self._cdf, self._popular, strict=True)):
            offsets = None
            n = rows
            if f >= self.config.num_features - self.config.num_lists:
                offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, rows))]).astype(
                    np.int32
                )
                n = int(offsets[-1])
            ids.append(Ids(popular[np.searchsorted(cdf, rng.random(n), side="right")], offsets))
        return dense, ids

    def _terms(self, dense: NDArray[np.float32], ids: list[Ids]) -> F64:
        """(4, rows): main, low rank, cross and dense terms, not yet standardized."""
        main = np.zeros(len(dense))
        for effects, column in zip(self._effects, ids, strict=True):
            main += _bag_means(effects[column.values], column.offsets)
        user, item = (
            self._factors[0][ids[self.user].values],
            self._factors[1][ids[self.item].values],
        )
        cross = self._cross[ids[self.small[0]].values, ids[self.small[1]].values]
        smooth = _times(dense, self._linear) + 0.5 * _times(
            np.tanh(dense.astype(np.float64)) ** 2, self._curved
        )
        return np.stack([main, (user * item).sum(1), cross, smooth])

    def _z(self, dense: NDArray[np.float32], ids: list[Ids]) -> F64:
        c = self.config
        share = np.array(
            [
                1 - c.low_rank - c.cross - c.dense,
                c.low_rank,
                c.cross,
                c.dense if c.num_dense else 0.0,
            ]
        )
        return _times(
            ((self._terms(dense, ids) - self._means[:, None]) / self._stds[:, None]).T,
            np.sqrt(share),
        )

    def schema(self) -> FeatureSchema:
        """Schema of the written columns: one table per column; lists are mean-pooled."""
        names = [f"cat_{f}" for f in range(self.config.num_features)]
        singles = self.config.num_features - self.config.num_lists
        tables = tuple(
            EmbeddingBagConfig(
                num_embeddings=size,
                embedding_dim=self.config.dim,
                name=f"t_{name}",
                feature_names=[name],
                pooling=PoolingType.SUM if f < singles else PoolingType.MEAN,
            )
            for f, (name, size) in enumerate(zip(names, self.cardinalities, strict=True))
        )
        dense = tuple(DenseColumn(column=f"d_{i}") for i in range(self.config.num_dense))
        return FeatureSchema(
            label="label",
            dense=dense,
            features=tuple(Feature(name=n, column=n) for n in names),
            tables=tables,
        )


def write_synthetic(directory: str | Path, config: SyntheticConfig | None = None) -> SyntheticPaths:
    """Write train/, eval/, schema.json and truth.json below a local directory.

    Equal configs write equal rows.

    Raises:
        ConfigError: the disk has no room for so many rows.
    Cost: about 3 s and 100 MB of Parquet per million rows of the default columns; memory of a few
    chunks of 65,536 rows.
    """
    config, root = config or SyntheticConfig(), Path(directory)
    check_room(root, config)
    planted = Planted(config)
    paths = SyntheticPaths(root / "train", root / "eval", root / "schema.json", root / "truth.json")
    schema = planted.schema()
    for _ in _write_part(planted, paths.train, _TRAIN, config.rows_train):
        pass
    scored = [
        (rows.logits, rows.labels)
        for rows in _write_part(planted, paths.eval, _EVAL, config.rows_eval)
    ]
    logits, labels = np.concatenate([s[0] for s in scored]), np.concatenate([s[1] for s in scored])
    schema.save(paths.schema)
    truth = bayes_scores(logits, labels, config.shuffle_labels) | {"config": asdict(config)}
    paths.truth.write_text(json.dumps(truth, indent=2) + "\n")
    return paths


def check_room(directory: str | Path, config: SyntheticConfig) -> None:
    """Check that a folder has room for the rows, before hours are spent on writing them.

    Dense values take 4 bytes each, for they do not compress, and ids about one.

    Raises:
        ConfigError: it has not, by a cautious estimate.
    """
    rows = config.rows_train + config.rows_eval
    needed = rows * (4 * config.num_dense + config.num_features)
    folder = Path(directory).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{rows} rows need about {format_bytes(needed)} of disk, and {folder} has "
            f"{format_bytes(free)} free. Make fewer rows, or make them elsewhere."
        )


def bayes_scores(
    logits: F64, labels: NDArray[np.int8], shuffled: bool = False
) -> dict[str, float | int | bool]:
    """The fields of truth.json: exact scores of the true logits on these labels.

    With shuffled labels they are the scores of chance.
    """
    rate = float(labels.mean())
    entropy = (
        -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else math.nan
    )
    order = np.argsort(logits, kind="stable")
    ranks = np.empty(len(logits))
    ranks[order] = np.arange(1, len(logits) + 1)  # true logits are continuous: no ties to share
    clicks = int(labels.sum())
    pairs = clicks * (len(labels) - clicks)
    auc = (
        (float(ranks[labels == 1].sum()) - clicks * (clicks + 1) / 2) / pairs if pairs else math.nan
    )
    logloss = float(np.mean(np.logaddexp(0, np.where(labels == 1, -logits, logits))))
    if shuffled:
        auc, logloss = 0.5, entropy
    return {
        "rows": len(labels),
        "base_rate": rate,
        "bayes_auc": auc,
        "bayes_logloss": logloss,
        "bayes_ne": logloss / entropy,
        "shuffled_labels": shuffled,
    }


def _write_part(
    planted: Planted, folder: Path, part: int, rows: int, chunks_per_file: int = 4
) -> Iterator[Rows]:
    folder.mkdir(parents=True, exist_ok=True)
    writer = None
    try:
        for index, start in enumerate(range(0, rows, CHUNK)):
            chunk = planted.chunk(part, index, min(CHUNK, rows - start))
            columns: dict[str, pa.Array] = {"label": pa.array(chunk.labels)}
            columns |= {f"d_{i}": pa.array(chunk.dense[:, i]) for i in range(chunk.dense.shape[1])}
            for f, (values, offsets) in enumerate(chunk.ids):
                array = pa.array(values.astype(np.int32))
                columns[f"cat_{f}"] = (
                    array if offsets is None else pa.ListArray.from_arrays(pa.array(offsets), array)
                )
            table = pa.table(columns)
            if index % chunks_per_file == 0:
                if writer is not None:
                    writer.close()
                writer = pq.ParquetWriter(
                    folder / f"part-{index // chunks_per_file:05}.parquet",
                    table.schema,
                    compression="snappy",
                )
            assert writer is not None
            writer.write_table(table, row_group_size=CHUNK)
            yield chunk
    finally:
        if writer is not None:
            writer.close()


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
    found: F64 = np.einsum("nk,k->n", matrix, vector)
    return found


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
        low, high = (
            (middle, high)
            if np.mean(1 / (1 + np.exp(-logits - middle))) < base_rate
            else (low, middle)
        )
    return (low + high) / 2
