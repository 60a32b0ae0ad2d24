"""`decode`: rows of messages that follow each other, as JSON objects or as Arrow IPC.

A message that holds no rows is refused. It ends the rows before it, so what is refused lies before
the rows of a reading, and a reading of fewer rows refuses the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from rayrec.storage import one_line
from rayrec.streams.objects import KafkaMessage, ObjectReader, given
from rayrec.streams.source import Refusal


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
    objects: ObjectReader | None, messages: Sequence[KafkaMessage], done: int, most: int, place: str
) -> Decoded:
    """Return the first rows of messages that have the same columns.

    Args:
        objects: reads JSON; without it messages are Arrow IPC.
        messages: at least one.
        done: rows of the first message that are done.
        most: rows at most.
        place: name of the partition.
    """
    refused: list[Refusal] = []
    for index, message in enumerate(messages):
        try:
            if objects is not None:
                table, done = objects.read(messages[index : index + most]), 0
                offset = messages[index + len(table) - 1].offset + 1
            else:
                table, offset, done = _tables(messages[index:], done, most)
        except (
            ValueError,
            TypeError,
            OverflowError,
            RecursionError,
            OSError,
            pa.ArrowException,
        ) as error:
            form = "arrow" if objects is None else "json"
            why = f"no {form} message: {one_line(error)}"
            # an empty value is how a topic says that a key is gone, and no row is lost by it
            refused.append(Refusal(f"{place} offset {message.offset}", why, int(bool(message[1]))))
            done = 0
        else:
            return Decoded(table, offset, done, tuple(refused))
    return Decoded(None, messages[-1].offset + 1, 0, tuple(refused))


def _tables(messages: Sequence[KafkaMessage], done: int, most: int) -> tuple[pa.Table, int, int]:
    """Return rows of streams of Arrow IPC that have the schema of the first one."""
    parts: list[pa.Table] = []
    left = most
    for message in messages:
        try:
            table = pa.ipc.open_stream(given(message.value)).read_all()
            # damaged offsets or indices point at any memory, and would end the process
            table.validate(full=True)
        except (ValueError, OSError, pa.ArrowException):
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
