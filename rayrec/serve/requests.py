"""Requests for scores: rows of a caller as the tensors that a model takes.

Rows come as Arrow record batches, as plain Python rows (dicts from column to value), or as the
tensors themselves. Columns are read, hashed and checked by the schema, as in training; labels are
not read. A user with many candidates is two such tables: one row, and n rows.

    # B rows, I dense columns, N candidates
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rayrec.data import Batch, to_batch
from rayrec.data.column_types import one_batch, plain_text
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.quant import mark_checked
from rayrec.serve.next_item import Top
from rayrec.serve.wire import columns_of, record_batch
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor

_MOST_REPEATED = 1 << 26  # bytes of one user's columns beside all candidates

Rows: TypeAlias = "pa.RecordBatch | pa.Table | Sequence[Mapping[str, Any]]"


class Request(NamedTuple):
    """Tensors of B rows.

    Attributes:
        dense: (B, I).
        ids: B bags per key.
        sequences: B lists of numbers each, by name.
        top: lists of the best items that are asked for; None asks for scores.
    """

    dense: Tensor
    ids: KeyedJaggedTensor
    sequences: Mapping[str, JaggedTensor] = MappingProxyType({})
    top: Top | None = None

    @classmethod
    def of_batch(cls, batch: Batch) -> Request:
        """Return the request for the scores of a batch."""
        return cls(batch.dense_features, batch.sparse_features, batch.sequences)


def marked(request: Request, is_checked: bool) -> Request:
    """Return a request, marked where none of its ids needs another look."""
    if is_checked:
        mark_checked(request.ids)
    return request


def arrow_rows(rows: Rows, schema: FeatureSchema, source: str) -> pa.RecordBatch | pa.Table:
    """Return rows in Arrow's form; plain rows become a record batch of their columns.

    Raises:
        InputError: the rows are of another kind, or a column of them has no one type.
    """
    if isinstance(rows, (pa.RecordBatch, pa.Table)):
        return rows
    if isinstance(rows, Mapping):
        raise InputError(f"{source} is a dict; give a list of dicts from column to value.")
    return record_batch(columns_of(rows, list(schema.columns()), source), source)


def read_rows(rows: Rows, schema: FeatureSchema, source: str = "the request") -> Batch:
    """Return rows as a batch, whose labels are zeros.

    Raises:
        InputError: names column, row and value of the first bad entry.
    """
    if isinstance(rows, Sequence) and not rows:
        return nothing(schema)
    return to_batch(arrow_rows(rows, schema, source), schema, source, with_labels=False)


def nothing(schema: FeatureSchema, rows: int = 0) -> Batch:
    """Return a batch of no rows, or of rows whose lists are empty."""
    features = schema.feature_names()
    none = torch.empty(0, dtype=torch.int64)
    ids = KeyedJaggedTensor(
        list(features),
        none,
        torch.empty(0) if schema.is_weighted else None,
        lengths=torch.zeros(len(features) * rows, dtype=torch.int32),
        stride=rows,
    )
    sequences = {}
    for one in schema.sequences:
        # a sequence that is no list has one number in each row
        count = int(one.most_recent is None and one.aligned_with is None)
        lengths = torch.full((rows,), count, dtype=torch.int32)
        numbers = torch.zeros(rows * count, dtype=torch.int64)
        sequences[one.name] = JaggedTensor(numbers, lengths=lengths)
    return Batch(
        dense_features=torch.zeros(rows, len(schema.dense)),
        sparse_features=ids,
        labels=torch.zeros((rows, len(schema.labels)) if len(schema.labels) > 1 else rows),
        global_rows=rows,
        sequences=sequences,
    )


class CandidateSplit:
    """Schema in two parts: the features of the user's row, and those of each candidate.

    Args:
        columns: those of the user; all others of the schema are the candidates'.
    """

    def __init__(self, schema: FeatureSchema, columns: frozenset[str]) -> None:
        self._schema = schema
        self.user = _part(schema, columns, True)
        self.candidate = _part(schema, columns, False)
        self._user_dense = [i for i, c in enumerate(schema.dense) if c.column in columns]
        self._own_dense = [i for i, c in enumerate(schema.dense) if c.column not in columns]

    @property
    def candidate_names(self) -> frozenset[str]:
        """Names of the features that each candidate has, and "" for dense columns and sequences."""
        own = self.candidate
        if own is None:
            return frozenset()
        # a dense column may have the name of a feature
        others = [""] if own.dense or own.sequences else []
        return frozenset([*own.feature_names(), *others])

    @property
    def is_whole(self) -> bool:
        """True if both parts have features, so that each can be read by itself."""
        return self.user is not None and self.candidate is not None

    def read(self, user: Rows, candidates: Rows) -> tuple[Batch, Batch]:
        """Return the one row of the user and the rows of the candidates.

        Raises:
            InputError: names column, row and value of the first bad entry.
        """
        assert self.user is not None and self.candidate is not None
        one = read_rows(user, self.user, "the user")
        many = read_rows(candidates, self.candidate, "the candidates")
        if one.rows != 1:
            raise InputError(f"the user has {one.rows} rows; give the one row of one user.")
        return one, many

    def request(self, user: Rows, candidates: Rows) -> Request:
        """Return one row of the user and N candidates as N rows; the user is looked up once.

        Raises:
            InputError: names column, row and value of the first bad entry.
        """
        one, many = self.read(user, candidates)
        rows = many.rows
        dense = torch.empty(rows, len(self._schema.dense))
        dense[:, self._user_dense] = one.dense_features
        dense[:, self._own_dense] = many.dense_features
        ids = _joined(one.sparse_features, many.sparse_features, rows)
        return Request(dense, ids, {**one.sequences, **many.sequences})


def _part(schema: FeatureSchema, columns: frozenset[str], inside: bool) -> FeatureSchema | None:
    """Return the schema of the features whose columns are among `columns`, or of the others."""
    features = tuple(f for f in schema.features if (f.column in columns) == inside)
    if not features:
        return None
    names = {feature.name for feature in features}
    tables = []
    for table in schema.tables:
        own = [name for name in table.feature_names if name in names]
        if own:
            tables.append(replace(table, feature_names=own))
    dense = tuple(c for c in schema.dense if (c.column in columns) == inside)
    return replace(
        schema,
        features=features,
        tables=tuple(tables),
        dense=dense,
        sequences=tuple(s for s in schema.sequences if (s.column in columns) == inside),
        weight=None,
    )


def _joined(one: KeyedJaggedTensor, many: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    """Join keys with one bag and keys with `rows` bags; all rows share the single bags."""
    keys = [*one.keys(), *many.keys()]
    weights = None
    if one.weights_or_none() is not None or many.weights_or_none() is not None:
        weights = torch.cat([_weights(one), _weights(many)])
    inverse = np.zeros((len(keys), rows), np.int64)
    inverse[len(one.keys()) :] = np.arange(rows)
    return KeyedJaggedTensor(
        keys,
        torch.cat([one.values(), many.values()]),
        weights,
        lengths=torch.cat([one.lengths(), many.lengths()]),
        stride_per_key_per_rank=[[1]] * len(one.keys()) + [[rows]] * len(many.keys()),
        inverse_indices=(keys, torch.from_numpy(inverse)),
    )


def _weights(ids: KeyedJaggedTensor) -> Tensor:
    weights = ids.weights_or_none()
    return torch.ones(ids.values().numel()) if weights is None else weights


def broadcast(user: Rows, candidates: Rows, schema: FeatureSchema) -> pa.RecordBatch:
    """Return the candidates' rows, each with the columns of the user beside its own.

    Raises:
        InputError: there is not one row of the user, or it is too large to be repeated so often.
    """
    one = _one_batch(arrow_rows(user, schema, "the user"))
    many = _one_batch(arrow_rows(candidates, schema, "the candidates"))
    if one.num_rows != 1:
        raise InputError(f"the user has {one.num_rows} rows; give the one row of one user.")
    if one.nbytes * many.num_rows > _MOST_REPEATED:
        raise InputError(
            f"the user's row has {one.nbytes} bytes, and this model needs it beside each of "
            f"{many.num_rows} candidates; ask for fewer at a time."
        )
    again = pa.array(np.zeros(many.num_rows, np.int64))
    arrays = [*(column.take(again) for column in one.columns), *many.columns]
    return pa.RecordBatch.from_arrays(arrays, names=[*one.schema.names, *many.schema.names])


def _one_batch(rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    rows = plain_text(rows)
    return rows if isinstance(rows, pa.RecordBatch) else one_batch(rows)


def user_columns(user: Rows, candidates: Rows, schema: FeatureSchema) -> frozenset[str]:
    """Return the schema's columns that the user's row has.

    Raises:
        InputError: a column is on both sides.
        ConfigError: an id column and its weights are on different sides.
    """
    wanted = set(schema.columns(with_labels=False))
    sides = [wanted & set(names_of(side)) for side in (user, candidates)]
    both = sides[0] & sides[1]
    if both:
        raise InputError(
            f"column {sorted(both)[0]!r} is in the user's row and in the candidates; leave it out "
            "of one of them."
        )
    for feature in schema.features:
        if feature.weights and (feature.column in sides[0]) != (feature.weights in sides[0]):
            raise ConfigError(
                f"feature {feature.name!r} has its ids in column {feature.column!r} and weights in "
                f"{feature.weights!r}; give both with the user or both with the candidates."
            )
    return frozenset(sides[0])


def are_none(rows: Rows) -> bool:
    """True if there is no row; what is no rows at all is left to whoever reads it."""
    return isinstance(rows, (pa.RecordBatch, pa.Table, Sequence)) and not len(rows)


def names_of(rows: Rows) -> list[str]:
    """Return the columns of some rows; those of the first of plain ones."""
    if isinstance(rows, (pa.RecordBatch, pa.Table)):
        return list(rows.schema.names)
    plain = rows if isinstance(rows, Sequence) else ()
    return list(plain[0]) if len(plain) and isinstance(plain[0], Mapping) else []
