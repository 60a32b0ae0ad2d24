"""Ground truth of retrieval, read from its data without a model: the items of each user.

Everything is read into memory as columns of ids: for data of some ten million rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from numpy.typing import NDArray

from rayrec.data import FeatureSchema
from rayrec.data.column_types import missing
from rayrec.errors import ConfigError, InputError
from rayrec.layout.tables import refuse_dynamic
from rayrec.storage import one_line

IdArray = NDArray[np.int64]


class Truth(NamedTuple):
    """Items of each user, and rows with the features of every user and item.

    Attributes:
        users: one row per user with held-out positives.
        items: one row per item that occurs anywhere, in the order of item_ids.
        item_ids: ids of those items.
        size: number of ids that items can have.
        counts: (size,) positive training rows of each id.
        relevant: per row of `users`, ids of held-out positives without a training row.
        seen: per row of `users`, ids with a training row.
        schema: schema of the rows.
    """

    users: pa.Table
    items: pa.Table
    item_ids: IdArray
    size: int
    counts: IdArray
    relevant: list[IdArray]
    seen: list[IdArray]
    schema: FeatureSchema

    @classmethod
    def load(
        cls, train_path: str, held_out_path: str, schema: FeatureSchema, user: str, item: str
    ) -> Truth:
        """Read both parts.

        Raises:
            InputError: a file cannot be read, or a row does not hold one id of the user and of the
                item, or a label that is neither 0 nor 1.
        """
        users, items = IdColumn(schema, user), IdColumn(schema, item)
        columns = list(schema.columns())
        train, held_out = read_rows(train_path, columns), read_rows(held_out_path, columns)
        is_click = click_labels(train, schema, train_path) == 1
        positive = click_labels(held_out, schema, held_out_path) == 1
        # Types of the two parts may differ, such as int32 and int64; the wider one is taken.
        everything = pa.concat_tables([train, held_out], promote_options="permissive")
        # The features of an item are those of the first row that holds it; the same for users
        # below.
        item_ids, item_rows = np.unique(items.ids(everything), return_index=True)
        # Both lists have an entry for every user id that there can be, with ids or without.
        wanted = lists_of(users.ids(held_out)[positive], items.ids(held_out)[positive], users.size)
        seen = lists_of(users.ids(train), items.ids(train), users.size)
        first = np.flatnonzero(positive)
        user_ids, places = np.unique(users.ids(held_out)[positive], return_index=True)
        return cls(
            users=held_out.take(pa.array(first[places])),
            items=everything.take(pa.array(item_rows)),
            item_ids=item_ids,
            size=items.size,
            counts=np.bincount(items.ids(train)[is_click], minlength=items.size),
            relevant=[np.setdiff1d(wanted[u], seen[u]) for u in user_ids],
            seen=[seen[u] for u in user_ids],
            schema=schema,
        )


def lists_of(owners: IdArray, items: IdArray, size: int) -> list[IdArray]:
    """Return the items of each owner."""
    # The order is stable, so each list keeps the order of the rows.
    order = np.argsort(owners, kind="stable")
    return np.split(items[order], np.cumsum(np.bincount(owners, minlength=size))[:-1])


class IdColumn:
    """Ids of a feature with one per row, and how many there can be.

    Raises:
        ConfigError: the schema has no such feature, hashes it, or cuts it from a log, or its table
            is dynamic.
    """

    def __init__(self, schema: FeatureSchema, feature: str) -> None:
        named = [f for f in schema.features if f.name == feature]
        if not named or named[0].hash_buckets is not None or named[0].history is not None:
            raise ConfigError(
                f"feature {feature!r} is not in the schema, or is hashed or a history; it must "
                "hold ids, one per row."
            )
        tables = [table for table in schema.tables if feature in table.feature_names]
        why = "recall needs ids that number its rows; number them and leave out 'dynamic'"
        refuse_dynamic(tables, why)
        self.feature, self.column = feature, named[0].column
        self.size = max(table.num_embeddings for table in tables)

    def ids(self, table: pa.Table) -> IdArray:
        """Return the id in each row.

        Raises:
            InputError: a row has none, or one that the feature's table has no row for.
        """
        column = table[self.column]
        if not pa.types.is_integer(column.type) or column.null_count:
            raise InputError(
                f"column {self.column!r} of feature {self.feature!r} is {column.type}; it must "
                "hold one integer id in each row."
            )
        ids: IdArray = column.to_numpy().astype(np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.size:
            raise InputError(
                f"feature {self.feature!r} has ids from {ids.min()} to {ids.max()}, its table has "
                f"{self.size} rows."
            )
        return ids


def read_rows(path: str, columns: Sequence[str]) -> pa.Table:
    """Columns of a folder or file of Parquet.

    Raises:
        InputError: it cannot be read, or lacks a column.
    """
    try:
        # A name that occurs twice could mean either column, so it is refused like a missing one.
        rows = ds.dataset(path, format="parquet")
        for column in columns:
            if rows.schema.names.count(column) != 1:
                raise InputError(missing(column, rows.schema, path))
        return rows.to_table(columns=list(columns))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot read {path} as Parquet: {one_line(error)}.") from error


def click_labels(rows: pa.Table, schema: FeatureSchema, path: str) -> NDArray[np.float64]:
    """Return the labels of some rows, each 0 or 1.

    Raises:
        ConfigError: the schema has several labels.
        InputError: names the first row with another one.
    """
    label = schema.one_label("retrieval")
    try:
        # A null becomes nan, which is neither 0 nor 1.
        labels: NDArray[np.float64] = rows[label].cast(pa.float64()).to_numpy()
    except pa.ArrowException as error:
        raise InputError(
            f"label column {label!r} of {path} holds no numbers: {one_line(error)}."
        ) from error
    bad = np.flatnonzero(~np.isin(labels, (0.0, 1.0)))
    if bad.size:
        value = rows[label][int(bad[0])].as_py()
        raise InputError(
            f"label column {label!r} holds {'null' if value is None else value} in row "
            f"{bad[0]} of {path}; labels are 0 or 1."
        )
    return labels
