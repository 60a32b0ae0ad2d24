"""Pooling factors and skew from a sample of the data, so that nobody has to guess them.

The pooling factor is the mean number of ids per row of each feature's column: 1 for a plain column,
less where it has nulls. The skew is the exponent of the Zipf law under which a step's ids would be
of as many different rows as they are. Real ids follow no such law from the first to the last, so it
is fitted to as many rows as a step has, spread over the sample. Costs one read of the sample. Ids
that are hashed later are counted before that.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.column_types import id_problem, is_list, missing
from rayrec.data.sampling import sample_rows
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.planner.zipf import fit_skew

SAMPLE_ROWS = 100_000
STEPS = 4  # number of sampled steps, over whose ids the mean is taken
LEAST = 0.01  # pooling factor of a feature without ids in the sample; prices need more than 0


def measure(
    schema: FeatureSchema, path: str | Path, step_rows: int, rows: int = SAMPLE_ROWS
) -> dict[str, dict[str, float]]:
    """Measure the ids per bag and the skew of each table on a sample.

    Args:
        step_rows: number of rows of a step, all ranks together.
        rows: number of rows of the sample, see `sample_rows`.
    Returns:
        fields of `ParameterConstraints` by table; for several features the mean of their pooling
        factors, and the skew of all their ids together, as they meet in the table's rows in a step.
    Raises:
        ConfigError: a feature is a history.
        InputError: an error of `sample_rows`, or a feature's column is missing or holds no ids.
    """
    for feature in schema.features:
        if feature.history is not None:
            raise ConfigError(
                f"feature {feature.name!r} is a history, which is cut from a log, and a profile "
                "reads columns as they are. Give its table a pooling_factor in --constraints."
            )
    column_of = {feature.name: feature.column for feature in schema.features}
    sample = sample_rows(str(path), rows).table
    for feature in schema.features:
        if feature.column not in sample.column_names:
            raise InputError(missing(feature.column, sample.schema, str(path)))
        # texts are counted, whatever becomes of them
        problem = id_problem(sample.schema.field(feature.column).type, feature, unbounded=True)
        if problem is not None:
            raise InputError(f"{path}: {problem}")
    sample = sample.select(sorted(set(column_of.values())))
    # Each step takes every n-th row, so that it is spread over the sample: rows that lie side by
    # side often hold the same ids.
    every = max(1, sample.num_rows // step_rows)
    steps = [
        sample.take(pa.array(range(first, sample.num_rows, every)))
        for first in range(min(every, STEPS))
    ]
    measured = {}
    for table in schema.tables:
        columns = [column_of[feature] for feature in table.feature_names]
        ids, seen = [], []  # by step: number of ids, and of different rows
        for step in steps:
            drawn = [_ids(step.column(column)) for column in columns]
            ids.append(sum(map(len, drawn)))
            seen.append(len(set().union(*(pc.unique(each).to_pylist() for each in drawn))))
        mean = fmean(len(_ids(sample.column(column))) / sample.num_rows for column in columns)
        skew = fit_skew(table.num_embeddings, fmean(ids), fmean(seen))
        measured[table.name] = {"pooling_factor": max(mean, LEAST), "skew": skew}
    return measured


def _ids(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return all ids of a column; a null is no id, and a null list an empty bag."""
    return pc.drop_null(pc.list_flatten(column) if is_list(column.type) else column)
