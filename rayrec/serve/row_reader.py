"""`RowReader`: requests to a model that scores rows of ids and dense columns.

A row has all columns of the schema. The columns of one user may be given once, beside those of many
candidates; they are repeated only where the model needs them in every row. Tensors need no schema.

    # B rows, I dense columns
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rayrec.data import Batch
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.serve.requests import (
    CandidateSplit,
    Request,
    Rows,
    are_none,
    broadcast,
    marked,
    read_rows,
    user_columns,
)
from rayrec.sparse import KeyedJaggedTensor

_MOST_SPLITS = 64


class RowReader:
    """Reads rows of columns, or tensors, as requests.

    Args:
        schema: schema of the columns; None reads tensors alone.
        is_checked: every id that the schema lets through has a row, so no lookup checks it again.
        takes_strides: keys of different numbers of bags reach the collections unchanged.
    """

    def __init__(self, schema: FeatureSchema | None, is_checked: bool, takes_strides: bool) -> None:
        self._schema, self._is_checked = schema, is_checked
        self._takes_strides = takes_strides
        self._splits: dict[frozenset[str], CandidateSplit] = {}

    def read(self, rows: Rows) -> Request:
        """Return the request of rows.

        Raises:
            InputError: a row cannot be read.
            ConfigError: there is no schema.
        """
        return self.of_batch(read_rows(rows, self._known_schema()))

    def of_tensors(self, ids: KeyedJaggedTensor, dense: Tensor | None) -> Request:
        """Return the request of ids with a (B, I) dense tensor beside them.

        Raises:
            InputError: the dense tensor has another shape or type, or holds NaN or infinity.
        """
        rows = ids.stride()
        if dense is None:
            dense = torch.empty(rows, 0)
        columns = None if self._schema is None else len(self._schema.dense)
        wanted = dense.shape[1] if columns is None and dense.dim() == 2 else columns
        if dense.shape != (rows, wanted) or not dense.is_floating_point():
            raise InputError(
                f"dense is {tuple(dense.shape)} {dense.dtype}; these ids have {rows} rows and the "
                f"model {wanted} dense columns: give ({rows}, {wanted}) float32."
            )
        # a sum is finite only where all of it is, unless it is too large for float32
        if not math.isfinite(float(dense.sum())) and not bool(dense.isfinite().all()):
            row, column = (int(place) for place in (~dense.isfinite()).nonzero()[0])
            raise InputError(
                f"dense column {column} holds {float(dense[row, column])} in row {row}. Clean the "
                "data."
            )
        return Request(dense.float(), ids)

    def of_batch(self, batch: Batch) -> Request:
        """Return the request of a batch that was read by the schema."""
        return marked(Request.of_batch(batch), self._is_checked)

    def of_user(self, user: Rows, candidates: Rows) -> Request:
        """Return the request of the candidates of one user, who is looked up once if possible.

        Raises:
            InputError, ConfigError: the errors of `read`; or a column is on both sides.
        """
        schema = self._known_schema()
        if are_none(candidates):
            return self.read([])
        columns = user_columns(user, candidates, schema)
        if columns not in self._splits:
            if len(self._splits) >= _MOST_SPLITS:
                self._splits.clear()
            self._splits[columns] = CandidateSplit(schema, columns)
        split = self._splits[columns]
        if split.is_whole and self._takes_strides:
            return marked(split.request(user, candidates), self._is_checked)
        return self.read(broadcast(user, candidates, schema))

    def best(self, rows: Rows, k: int | None, masked: bool) -> Request:
        """Raise ConfigError: such a model ranks no items."""
        raise ConfigError(
            "k and masked are for next-item models, which rank items; this is another one. "
            "Give rows with all columns."
        )

    def _known_schema(self) -> FeatureSchema:
        if self._schema is None:
            raise ConfigError(
                "the artifact has no schema, so rows of columns cannot be read; give a "
                "KeyedJaggedTensor and dense, or export with schema=."
            )
        return self._schema
