"""Click data with planted truth: every row's click probability, and the best score, are known.

The rows come from `planted` and are written as they are drawn: memory is one chunk. `truth.json`
states the scores of the true probabilities on the evaluation rows; `shuffle_labels` breaks the tie
between rows and labels, after which any model that scores other than chance has seen the future.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.converted import PartsWriter
from rayrec.data.planted import CHUNK, F64, Planted, Rows, SyntheticConfig
from rayrec.errors import ConfigError
from rayrec.layout.units import format_bytes

TRUE_LOGIT = "true_logit"  # a column of rows whose ids are born and die
_TRAIN, _EVAL = range(2)  # parts of a data set, each with random numbers of its own


class SyntheticPaths(NamedTuple):
    """The paths that `write_synthetic` wrote."""

    train: Path
    eval: Path
    schema: Path
    truth: Path


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
    root.mkdir(parents=True, exist_ok=True)
    planted = Planted(config)
    paths = SyntheticPaths(root / "train", root / "eval", root / "schema.json", root / "truth.json")
    for _ in _write_part(planted, paths.train, _TRAIN, config.rows_train):
        pass
    logits, labels = [], []
    for rows in _write_part(planted, paths.eval, _EVAL, config.rows_eval):
        logits.append(rows.logits)
        labels.append(rows.labels)
    planted.schema().save(paths.schema)
    scores = bayes_scores(np.concatenate(logits), np.concatenate(labels), config.shuffle_labels)
    truth = scores | {"config": asdict(config)}
    paths.truth.write_text(json.dumps(truth, indent=2) + "\n")
    return paths


def check_room(directory: str | Path, config: SyntheticConfig) -> None:
    """Check that a folder has room for the rows, before hours are spent on writing them.

    Dense values take 4 bytes each, for they do not compress, and ids about one; those of 64 bits
    about 4.

    Raises:
        ConfigError: it has not, by a cautious estimate.
    """
    rows = config.rows_train + config.rows_eval
    of_ids = config.num_features * (1 if config.lifetime is None else 4)
    of_truth = 0 if config.lifetime is None else 8
    check_free(directory, rows, "rows", rows * (4 * config.num_dense + of_ids + of_truth))


def check_free(directory: str | Path, count: int, what: str, needed: int) -> None:
    """Check that a folder, or the nearest one above it, has so many bytes free.

    Args:
        count, what: of which there are so many bytes, for the message.
    Raises:
        ConfigError: it has not.
    """
    folder = Path(directory).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{count} {what} need about {format_bytes(needed)} of disk, and {folder} has "
            f"{format_bytes(free)} free. Make fewer {what}, or make them elsewhere."
        )


def bayes_scores(
    logits: F64, labels: NDArray[np.int8] | NDArray[np.bool_], shuffled: bool = False
) -> dict[str, float | int | bool]:
    """The fields of truth.json: exact scores of the true logits on these labels.

    With shuffled labels they are the scores of chance.
    """
    rate, entropy, auc = float(labels.mean()), math.nan, math.nan
    if 0 < rate < 1:
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    # ranks from 1, of which equal logits share the mean
    _, places, counts = np.unique(logits, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    clicks = int(labels.sum())
    pairs = clicks * (len(labels) - clicks)
    if pairs:
        auc = (float(ranks[labels == 1].sum()) - clicks * (clicks + 1) / 2) / pairs
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


def _write_part(planted: Planted, folder: Path, part: int, rows: int) -> Iterator[Rows]:
    """Write one part chunk by chunk, and give each chunk when it is written."""
    writer = PartsWriter(folder, groups_per_file=4)
    try:
        for index, start in enumerate(range(0, rows, CHUNK)):
            chunk = planted.chunk(part, index, min(CHUNK, rows - start))
            columns: dict[str, pa.Array] = {"label": pa.array(chunk.labels)}
            if planted.config.lifetime is not None:
                columns[TRUE_LOGIT] = pa.array(chunk.logits)
            columns |= {f"d_{i}": pa.array(chunk.dense[:, i]) for i in range(chunk.dense.shape[1])}
            for f, (values, offsets) in enumerate(chunk.ids):
                kind = np.int32 if planted.config.lifetime is None else np.int64
                column = pa.array(values.astype(kind))
                if offsets is not None:
                    column = pa.ListArray.from_arrays(pa.array(offsets), column)
                columns[f"cat_{f}"] = column
            writer.add(pa.table(columns))
            yield chunk
    finally:
        writer.close()
