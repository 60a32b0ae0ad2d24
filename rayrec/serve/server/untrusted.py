"""Bytes from anybody as a table that is safe to read.

An Arrow stream says itself where its buffers begin and how long they are. Arrow checks that they
lie inside of the message; offsets, text and dictionaries are checked here, in full, before anything
reads them. A few bytes must not stand for a lot of memory either: compressed bodies are refused, so
are types that repeat values, and the rows have a bound. So what a request takes is a small multiple
of its bytes and rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa

from rayrec.data.column_types import is_list, is_text
from rayrec.errors import InputError
from rayrec.storage import one_line

_ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)


def read_request(data: bytes, columns: Sequence[str], most_rows: int) -> pa.RecordBatch:
    """Read a request.

    Args:
        data: one Arrow IPC stream.
        columns: what is kept of it, in this order; a column that is missing is told by the
            schema's reader.
        most_rows: refuse more.
    Raises:
        InputError: the bytes are no such stream, are compressed, hold too many rows or a column of
            a type that is not read.
    """
    if not data:
        raise InputError("the request is empty; send one Arrow IPC stream with the columns.")
    try:
        return _read(data, columns, most_rows)
    except InputError:
        raise
    # of headers, of names that are no text, of offsets that lead elsewhere
    except (pa.ArrowException, OSError, ValueError, LookupError, struct.error) as error:
        raise InputError(
            f"the request is no whole Arrow IPC stream: {one_line(error)}. Write it with "
            "pyarrow.ipc.new_stream, or ask by rayrec.serve.Client."
        ) from error


def _read(data: bytes, columns: Sequence[str], most_rows: int) -> pa.RecordBatch:
    for message in pa.ipc.MessageReader.open_stream(data):
        if _is_compressed(message):
            raise InputError("the request is compressed; send the Arrow stream as it is.")
    table = pa.ipc.open_stream(pa.py_buffer(data), options=_ALIGNED).read_all()
    if table.num_rows > most_rows:
        raise InputError(
            f"the request has {table.num_rows} rows and at most {most_rows} are taken; send them "
            "in several requests."
        )
    names = table.schema.names
    at = [number for name in columns for number in range(len(names)) if names[number] == name]
    kept = table.select(at).replace_schema_metadata(None)
    for field in kept.schema:
        _check_type(field.name, field.type)
    kept.validate(full=True)
    batches = kept.combine_chunks().to_batches()
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=kept.schema)
    batch: pa.RecordBatch = batches[0]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        _check_no_nulls_alone(name, column)
    return batch


def _is_compressed(message: pa.Message) -> bool:
    """Whether the buffers of a message are compressed, which its header says.

    The header is a flatbuffer of Arrow's Message, which Arrow has verified: a table holds the
    distance to its list of fields, and that the place of each field, or 0.
    """
    if message.type not in ("record batch", "dictionary"):
        return False
    header = memoryview(message.metadata)

    def field(table: int, number: int) -> int:
        listed = table - struct.unpack_from("<i", header, table)[0]
        place = 4 + 2 * number
        if place >= struct.unpack_from("<H", header, listed)[0]:
            return 0
        distance = struct.unpack_from("<H", header, listed + place)[0]
        return table + distance if distance else 0

    def follow(place: int) -> int:
        distance: int = struct.unpack_from("<I", header, place)[0]
        return place + distance

    batch = follow(field(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    return field(batch, 3) != 0


def _check_type(name: str, kind: pa.DataType) -> None:
    t = pa.types
    leaf = kind.value_type if is_list(kind) else kind
    inner = leaf.value_type if t.is_dictionary(leaf) else leaf
    number = t.is_integer(inner) or t.is_floating(inner) or t.is_boolean(inner)
    text = is_text(inner) and not (t.is_fixed_size_binary(inner) and inner.byte_width == 0)
    if not (number or text or t.is_decimal(inner) or t.is_null(inner)):
        raise InputError(
            f"column {name!r} of the request has type {kind}; send numbers, text, or lists of "
            "either."
        )


def _check_no_nulls_alone(name: str, column: pa.Array) -> None:
    """Refuse lists of nulls, which take no bytes and may be of any length."""
    if is_list(column.type) and pa.types.is_null(column.type.value_type) and len(column.values):
        raise InputError(f"column {name!r} has a null inside the list; leave null elements out.")
