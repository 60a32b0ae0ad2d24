"""`ObjectReader`: rows of JSON objects, one a message.

Messages are parsed one by one, by Python, or all together, by Arrow, which costs a sixth of the
time and holds no lock. Together they are read only where that is sure to give the same rows, of the
same types; else one by one, which says what is a row. What fails costs time, so the next messages
are read one by one, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

PAUSE = 4_000  # messages read one by one after some that could not be read together
MOST_LISTS = 256  # of a message; Arrow's parser would overflow its stack on deep nesting
MOST_EXACT = 2**53  # below it every whole number is a float64 of its own


class KafkaMessage(NamedTuple):
    """Message of a partition."""

    offset: int
    value: bytes | None


class ObjectReader:
    """Reads rows of messages that are JSON objects.

    Args:
        whole: columns of whole numbers. An object with a fraction in one of them ends the rows
            before it, which would have a column of fractions with it.
    """

    def __init__(self, whole: Collection[str] = ()) -> None:
        self._whole = frozenset(whole)
        self._pause = 0

    def read(self, messages: Sequence[KafkaMessage]) -> pa.Table:
        """Return a row of each of the first messages that have the same columns.

        Raises:
            ValueError: the first message is no row, by whatever subclass.
        """
        first, table = row_of(messages[0].value), None
        if not self._pause and len(messages) > 1:
            table = self._together(messages, first)
            self._pause = PAUSE if table is None else 0
        if table is None:
            table = self._one_by_one(messages, first)
            self._pause = max(0, self._pause - len(table))
        return table

    def _one_by_one(self, messages: Sequence[KafkaMessage], first: Mapping[str, Any]) -> pa.Table:
        rows = [first]
        for message in messages[1:]:
            try:
                row = row_of(message.value)
            except (ValueError, RecursionError):
                break
            if row.keys() != first.keys():
                break
            rows.append(row)
        while True:
            try:
                table = pa.Table.from_pylist(rows)
            except (ValueError, TypeError, OverflowError, pa.ArrowException):
                if len(rows) == 1:
                    raise
                # values of several types do not make one column
                rows = rows[: len(rows) // 2]
                continue
            mixed = [one for one in self._whole & first.keys() if _is_floating(table[one].type)]
            odd = [_has_fraction(row, mixed) for row in rows] if mixed else []
            if all(odd) or not any(odd):
                return table
            rows = rows[: odd.index(not odd[0])]

    def _together(
        self, messages: Sequence[KafkaMessage], first: Mapping[str, Any]
    ) -> pa.Table | None:
        """Return what `_one_by_one` does if these are rows of all messages, or None if that is not
        sure. If it is sure of messages, it is sure of the first of them.
        """
        count, values = len(messages), [message.value or b"" for message in messages]
        text = b"\n".join([*values, b""])
        # with a brace at the beginning of each message and no other, n objects are one of each
        if text.count(b"{") != count or not all(
            value.startswith(b"{") and value.count(b"[") < MOST_LISTS for value in values
        ):
            return None
        texts = [name for name, value in first.items() if isinstance(value, str)]
        try:
            table = arrow_json.read_json(
                pa.BufferReader(text),
                # one block, so that a newline in a message is in the middle of none
                arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
                # Arrow takes a text for a time where it can
                arrow_json.ParseOptions(pa.schema([(name, pa.string()) for name in texts])),
            )
            if table.num_rows != count or {*table.column_names} != {*first}:
                return None
            table = table.select(list(first))
            # texts may be no UTF-8, and Arrow 26 loses a null at the beginning of a list
            table.validate(full=True)
        except (ValueError, OverflowError, pa.ArrowException):
            return None
        if any(column.null_count for column in table.columns):
            # a key that is missing is a null, too, and has no colon
            colons = [pc.sum(pc.count_substring(table[one], ":")).as_py() or 0 for one in texts]
            if ":" in "".join(first) or text.count(b":") != count * len(first) + sum(colons):
                return None
        sure = (name in texts or self._is_sure(name, table[name]) for name in first)
        return table if all(sure) else None

    def _is_sure(self, name: str, column: pa.ChunkedArray) -> bool:
        """Return True if the values are those that Python reads."""
        kind = column.type
        if pa.types.is_list(kind):
            column, kind = pc.list_flatten(column), kind.value_type
        if not pa.types.is_floating(kind):
            return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or kind == pa.null())
        if name in self._whole:
            return False
        # Python has whole numbers of any size, among which there is no -0
        values = np.asarray(column.drop_null())
        is_exact = np.abs(values) < MOST_EXACT
        return bool(is_exact.all()) and not np.signbit(values[values == 0]).any()


def row_of(value: bytes | None) -> dict[str, Any]:
    """Return the object that a message is.

    Raises:
        ValueError: it is none, or has no keys.
    """
    row = json.loads(given(value))
    if not isinstance(row, dict) or not row:
        raise ValueError("it is no object with keys")
    return row


def given(value: bytes | None) -> bytes:
    """Return the value of a message.

    Raises:
        ValueError: it is empty.
    """
    if not value:
        raise ValueError("its value is empty")
    return value


def _is_floating(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind.value_type if pa.types.is_list(kind) else kind))


def _has_fraction(row: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return True where one of these columns has a float, or a list with one."""
    for name in names:
        value = row[name]
        if any(isinstance(one, float) for one in (value if isinstance(value, list) else [value])):
            return True
    return False
