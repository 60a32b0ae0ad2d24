"""`RowReader` and `NextItemReader`: what a caller asks of a model, as requests.

A row of ids and dense columns has all columns of the schema. The columns of one user may be given
once, beside those of many candidates; they are repeated only where the model needs them in every
row. Tensors need no schema.

A row for a next-item model has the list of a history, with what the schema has beside it:

    rows with an item each        the score of the item
    one user, many candidates     the scores of all of them; the history is encoded once
    rows without an item          the best k of all items

Long lists are cut to their most recent entries.

    # B rows, I dense columns
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from rayrec.checks import whole_number
from rayrec.data import Batch
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.models.next_item import item_ids
from rayrec.next_item_recipe import NextItemModel
from rayrec.serve.next_item import Top
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
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor

_MOST_SPLITS = 64
_MOST_LISTED = 1 << 22  # places in the lists of one answer


class UserOnce(NamedTuple):
    """What a model asks of the sides, to take the bags of a user once, beside many candidates.

    Attributes:
        candidates: features that each candidate has.
        of_user: features that the user has.
        alone: the candidates have nothing but `candidates`.
    """

    candidates: frozenset[str] = frozenset()
    of_user: frozenset[str] = frozenset()
    alone: bool = False

    def fits(self, given: frozenset[str]) -> bool:
        """True if it may be done where the candidates have these names."""
        if self.of_user & given or (self.alone and given != self.candidates):
            return False
        return self.candidates <= given


class RowReader:
    """Reads rows of ids and dense columns, or tensors.

    Args:
        schema: schema of the columns; None reads tensors alone.
        is_checked: every id that the schema lets through has a row, so no lookup checks it again.
        once: keys of different numbers of bags reach the collections unchanged, and the model
            takes them so; None where it needs the user's columns in every row.
    """

    def __init__(
        self, schema: FeatureSchema | None, is_checked: bool, once: UserOnce | None
    ) -> None:
        self._schema, self._is_checked, self._once = schema, is_checked, once
        if schema is not None:
            # of a method it would keep the reader alive until the garbage collector comes
            self._split = lru_cache(_MOST_SPLITS)(partial(CandidateSplit, schema))

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
        split = self._split(user_columns(user, candidates, schema))
        if split.is_whole and self._once is not None and self._once.fits(split.candidate_names):
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


class NextItemReader:
    """Reads rows for a next-item model.

    Args:
        schema: as `NextItemRecipe.request_schema` makes it.
        model: the model, whose longest list of `ks` is the default of k.
        is_checked: every id that the schema lets through has a row, so no lookup checks it again.
    """

    def __init__(self, schema: FeatureSchema, model: NextItemModel, is_checked: bool) -> None:
        self._schema, self._model, self._is_checked = schema, model, is_checked
        (item,) = (one for one in schema.features if one.name == model.item)
        (self._items,) = (t.num_embeddings for t in schema.tables if item.name in t.feature_names)
        self._column = item.column
        columns = frozenset(schema.columns(with_labels=False)) - {item.column}
        self._columns, self._split = columns, CandidateSplit(schema, columns)

    def read(self, rows: Rows) -> Request:
        """Return the request of rows that all have an item; of others that of `best`.

        Raises:
            InputError: the rows cannot be read.
        """
        if self._has_items(rows) or (isinstance(rows, Sequence) and not rows):
            return self.of_batch(read_rows(rows, self._schema))
        return self.best(rows)

    def of_tensors(self, ids: KeyedJaggedTensor, dense: Tensor | None) -> Request:
        """Raise InputError: the request to such a model has no form as tensors."""
        raise InputError("a next-item model is given rows of columns; these are tensors.")

    def of_batch(self, batch: Batch) -> Request:
        """Return the request of a batch with an item in each row.

        Raises:
            InputError: a row has no item, or several.
        """
        item_ids(batch, self._model.item)
        return marked(Request.of_batch(batch), self._is_checked)

    def of_user(self, user: Rows, candidates: Rows) -> Request:
        """Return the request of the candidates of one user.

        Raises:
            InputError: the rows cannot be read, or a column is on the wrong side.
        """
        if are_none(candidates):
            return self.read([])
        columns = user_columns(user, candidates, self._schema)
        if columns != self._columns:
            raise InputError(
                f"the user has the columns {sorted(columns)}; to a next-item model the user has "
                f"{sorted(self._columns)}, and each candidate {self._column!r}."
            )
        one, many = self._split.read(user, candidates)
        items = item_ids(many, self._model.item)
        ids = _with_items(one.sparse_features, self._model.item, items, [len(items)])
        return marked(Request(one.dense_features, ids, one.sequences), self._is_checked)

    def best(self, rows: Rows, k: int | None = None, masked: bool = False) -> Request:
        """Return the request of the best items of each row.

        Args:
            k: length of the lists; None takes the longest that training scored.
            masked: leave out what a row has seen: its history, and the model's sequence `seen`.
        Raises:
            InputError: the rows cannot be read, or have an item; or the lists are too long.
        """
        assert self._split.user is not None, "a history is read"
        if self._has_items(rows):
            raise InputError(
                f"all items are to be ranked, and the rows have column {self._column!r}, the item "
                "to score; leave it out, or ask for its score."
            )
        k = whole_number("k", max(self._model.ks) if k is None else k)
        if k > self._items:
            raise InputError(f"k={k} is longer than a list of all {self._items} items.")
        batch = read_rows(rows, self._split.user)
        if batch.rows * k > _MOST_LISTED:
            raise InputError(
                f"{batch.rows} lists of k={k} items are more than {_MOST_LISTED} places; ask for "
                "fewer at a time."
            )
        none = torch.empty(0, dtype=torch.int64)
        ids = _with_items(batch.sparse_features, self._model.item, none, [0] * batch.rows)
        left_out: list[JaggedTensor] = []
        if masked:
            left_out = [batch.sparse_features[self._model.history]]
        if masked and self._model.seen is not None:
            left_out.append(batch.sequences[self._model.seen])
        top = Top(k, tuple(left_out))
        return marked(Request(batch.dense_features, ids, batch.sequences, top), self._is_checked)

    def _has_items(self, rows: Rows) -> bool:
        """True if a row names an item; a plain row may have a column that the first has not."""
        if isinstance(rows, (pa.RecordBatch, pa.Table)):
            return self._column in rows.schema.names
        plain = rows if isinstance(rows, Sequence) else ()
        return any(isinstance(row, Mapping) and self._column in row for row in plain)


def _with_items(
    histories: KeyedJaggedTensor, item: str, ids: Tensor, counts: list[int]
) -> KeyedJaggedTensor:
    """Return histories with the items of each row beside them."""
    lengths = histories.lengths()
    return KeyedJaggedTensor(
        [*histories.keys(), item],
        torch.cat([histories.values(), ids]),
        lengths=torch.cat([lengths, torch.tensor(counts, dtype=lengths.dtype)]),
        stride=histories.stride(),
    )
