"""`decode`: rows of messages that follow each other, as JSON objects or as Arrow IPC.

A message that holds no rows is refused. It ends the rows before it, so what is refused lies before
the rows of a reading, and a reading of fewer rows refuses the same.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from rayrec.storage import one_line
from rayrec.streams.source import Refusal


class Message(NamedTuple):
    """Message of a partition."""

    offset: int
    value: bytes | None


class Decoded(NamedTuple):
    """Rows of messages, and the place behind them.

    Attributes:
        offset: of the first message that is not done, or one past the last.
        done: rows of that message that are done.
    """

    rows: pa.Table | None
    offset: int
    done: int
    refused: tuple[Refusal, ...]


def decode(
    form: str,
    messages: Sequence[Message],
    done: int,
    most: int,
    place: str,
    whole: Collection[str] = (),
) -> Decoded:
    """Return the first rows of messages that have the same columns.

    Args:
        form: "json" or "arrow".
        messages: at least one.
        done: rows of the first message that are done.
        most: rows at most.
        place: name of the partition.
        whole: columns of whole numbers. In JSON an object with a fraction in one of them ends the
            rows before it, which would have a column of fractions with it.
    """
    refused: list[Refusal] = []
    for index, message in enumerate(messages):
        try:
            if form == "json":
                table, offset, done = *_objects(messages[index : index + most], whole), 0
            else:
                table, offset, done = _tables(messages[index:], done, most)
        except (ValueError, TypeError, OverflowError, RecursionError, OSError) as error:
            why = f"no {form} message: {one_line(error)}"
            # an empty value is how a topic says that a key is gone, and no row is lost by it
            refused.append(Refusal(f"{place} offset {message.offset}", why, int(bool(message[1]))))
            done = 0
        else:
            return Decoded(table, offset, done, tuple(refused))
    return Decoded(None, messages[-1].offset + 1, 0, tuple(refused))


def _objects(messages: Sequence[Message], whole: Collection[str]) -> tuple[pa.Table, int]:
    """Return one row of each message, and the offset behind them.

    Raises:
        ValueError: the first message is no row, by whatever subclass.
    """
    rows = [_object(messages[0].value)]
    is_odd = _has_fraction(rows[0], whole)
    for message in messages[1:]:
        try:
            row = _object(message.value)
        except (ValueError, RecursionError):
            break
        if row.keys() != rows[0].keys() or _has_fraction(row, whole) != is_odd:
            break
        rows.append(row)
    while True:
        try:
            return pa.Table.from_pylist(rows), messages[len(rows) - 1].offset + 1
        except (pa.ArrowException, TypeError, OverflowError):
            if len(rows) == 1:
                raise
            # values of several types do not make one column
            rows = rows[: len(rows) // 2]


def _object(value: bytes | None) -> dict[str, Any]:
    row = json.loads(_given(value))
    if not isinstance(row, dict) or not row:
        raise ValueError("it is no object with keys")
    return row


def _has_fraction(row: dict[str, Any], names: Collection[str]) -> bool:
    """Return True where one of these columns has a float, or a list with one."""
    for name in names:
        value = row.get(name)
        if any(isinstance(one, float) for one in (value if isinstance(value, list) else [value])):
            return True
    return False


def _tables(messages: Sequence[Message], done: int, most: int) -> tuple[pa.Table, int, int]:
    """Return rows of streams of Arrow IPC that have the schema of the first one."""
    parts: list[pa.Table] = []
    left = most
    for message in messages:
        try:
            table = pa.ipc.open_stream(_given(message.value)).read_all()
        except (ValueError, OSError):
            if not parts:
                raise
            break
        if parts and table.schema != parts[0].schema:
            break
        parts.append(table.slice(done, left))
        left -= len(parts[-1])
        done += len(parts[-1])
        offset = message.offset
        if done < len(table):
            break
        offset, done = message.offset + 1, 0
        if not left:
            break
    return pa.concat_tables(parts), offset, done


def _given(value: bytes | None) -> bytes:
    if not value:
        raise ValueError("its value is empty")
    return value
