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
from rayrec.data.column_types import is_text, missing, plain_text, roomy
from rayrec.data.columns import feature_ids
from rayrec.errors import ConfigError, InputError
from rayrec.storage import one_line

IdArray = NDArray[np.int64]


class Truth(NamedTuple):
    """Items of each user, and rows with the features of every user and item.

    Attributes:
        users: one row per user with held-out positives.
        items: one row per item that occurs anywhere, in the order of item_ids.
        item_ids: ids of those items, ascending.
        counts: positive training rows of each of them.
        relevant: per row of `users`, ids of held-out positives without a training row.
        seen: per row of `users`, ids with a training row.
        schema: schema of the rows.
    """

    users: pa.Table
    items: pa.Table
    item_ids: IdArray
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
        everything = roomy(pa.concat_tables([train, held_out], promote_options="permissive"))
        # The features of an item are those of the first row that holds it; the same for users
        # below.
        of_items, rows = items.ids(everything), train.num_rows
        item_ids, item_rows = np.unique(of_items, return_index=True)
        # Users are numbered, and both lists have an entry for every user, with ids or without.
        user_ids, of_users = np.unique(users.ids(everything), return_inverse=True)
        wanted = lists_of(of_users[rows:][positive], of_items[rows:][positive], len(user_ids))
        seen = lists_of(of_users[:rows], of_items[:rows], len(user_ids))
        first = np.flatnonzero(positive)
        asked, places = np.unique(of_users[rows:][positive], return_index=True)
        clicked = np.searchsorted(item_ids, of_items[:rows][is_click])
        return cls(
            users=everything.take(pa.array(rows + first[places])),
            items=everything.take(pa.array(item_rows)),
            item_ids=item_ids,
            counts=np.bincount(clicked, minlength=len(item_ids)),
            relevant=[np.setdiff1d(wanted[u], seen[u]) for u in asked],
            seen=[seen[u] for u in asked],
            schema=schema,
        )


def lists_of(owners: IdArray, items: IdArray, size: int) -> list[IdArray]:
    """Return the items of each owner."""
    # The order is stable, so each list keeps the order of the rows.
    order = np.argsort(owners, kind="stable")
    return np.split(items[order], np.cumsum(np.bincount(owners, minlength=size))[:-1])


class IdColumn:
    """Ids of a feature with one per row.

    Attributes:
        size: how many there can be.
    Raises:
        ConfigError: the schema has no such feature, hashes it, or cuts it from a log.
    """

    def __init__(self, schema: FeatureSchema, feature: str) -> None:
        named = [f for f in schema.features if f.name == feature]
        if not named or named[0].hash_buckets is not None or named[0].history is not None:
            raise ConfigError(
                f"feature {feature!r} is not in the schema, or is hashed or a history; it must "
                "hold ids, one per row."
            )
        (self.feature,) = named
        self.tables = [table for table in schema.tables if feature in table.feature_names]
        self.size = max(table.id_limit for table in self.tables)
        self._unbounded = feature in schema.unbounded()

    def ids(self, table: pa.Table) -> IdArray:
        """Return the id in each row.

        Raises:
            InputError: a row has none, or one that the feature's table has no row for.
        """
        column, name = table[self.feature.column], self.feature.name
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        is_id = pa.types.is_integer(kind) or (self._unbounded and is_text(kind))
        if not is_id or column.null_count:
            raise InputError(
                f"column {self.feature.column!r} of feature {name!r} is {column.type}; it must "
                "hold one id in each row, an integer or, where its tables are dynamic, a text."
            )
        parts = [feature_ids(part, self.feature, self._unbounded) for part in column.chunks]
        ids: IdArray = np.concatenate([np.zeros(0, np.int64), *parts], dtype=np.int64)
        if ids.size and not self._unbounded and not 0 <= ids.min() <= ids.max() < self.size:
            held = [part for part in parts if len(part)]
            low, high = min(part.min() for part in held), max(part.max() for part in held)
            raise InputError(
                f"feature {name!r} has ids from {low} to {high}, its table has {self.size} rows."
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
        return plain_text(rows.to_table(columns=list(columns)))
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
