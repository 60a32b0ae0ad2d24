"""Bytes from anybody as a table that is safe to read.

An Arrow stream says itself where its buffers begin and how long they are. Arrow checks that they
lie inside of the message; offsets, text and dictionaries are checked here, in full, before anything
reads them. A few bytes must not stand for a lot of memory either. So refused are compressed bodies,
buffers that share bytes, lists that share values, columns that occur twice, types that repeat
values, and dictionaries that grow; batches and rows have a bound. What a request takes is a small
multiple of its bytes and rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.column_types import is_list, is_list_view, is_text, missing
from rayrec.errors import InputError
from rayrec.storage import one_line

_ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
# schemas that are remembered, and bytes of one of them at most
_MOST_KEPT, _LARGEST_KEPT = 64, 1 << 16
# each takes time for its columns and their dictionaries, however few rows it has
_MOST_BATCHES = 256


class _Layout(NamedTuple):
    """Columns to keep of a stream, by its schema.

    Attributes:
        at: indices of the columns to keep, in the wanted order; None keeps all as they are.
        of_nulls: indices of those among them that are lists of nulls.
        of_views: indices of those whose lists say where each begins and ends.
    """

    at: list[int] | None
    of_nulls: list[int]
    of_views: list[int]


class RequestReader:
    """Reads requests.

    Args:
        columns: columns to keep of a request, in this order; the reader of the schema reports a
            missing one.
        most_rows: largest number of rows of a request.
    """

    def __init__(self, columns: Sequence[str], most_rows: int) -> None:
        self.columns, self._most_rows = tuple(columns), most_rows
        # most requests have one of a few schemas, whose check takes longer than all the rest
        self._layouts: dict[bytes, _Layout] = {}

    def read(self, data: bytes) -> pa.RecordBatch:
        """Read one Arrow IPC stream.

        Raises:
            InputError: the bytes are no such stream, or stand for more than they are, or hold too
                many rows, a column twice or one of a type that is not read.
        """
        if not data:
            raise InputError("the request is empty; send one Arrow IPC stream with the columns.")
        try:
            return self._read(data)
        except InputError:
            raise
        # from damaged headers, names that are no text, and offsets that lead elsewhere
        except (pa.ArrowException, OSError, ValueError, LookupError, struct.error) as error:
            raise InputError(
                f"the request is no whole Arrow IPC stream: {one_line(error)}. Write it with "
                "pyarrow.ipc.new_stream, or ask by rayrec.serve.Client."
            ) from error

    def _read(self, data: bytes) -> pa.RecordBatch:
        # sees that the first message is a schema; `pa.ipc.read_schema` crashes where it is another
        reader = pa.ipc.open_stream(pa.py_buffer(data), options=_ALIGNED)
        messages = pa.ipc.MessageReader.open_stream(data)
        layout = self._layout(messages.read_next_message(), reader)
        batches = 0
        for message in messages:
            batches += message.type == "record batch"
            _check_buffers(message)
        if batches > _MOST_BATCHES:
            raise InputError(
                f"the request has {batches} record batches and at most {_MOST_BATCHES} are taken; "
                "combine them."
            )
        table = reader.read_all()
        rows = table.num_rows
        self.check_rows(rows)
        if layout.at is not None:
            table = table.select(layout.at).replace_schema_metadata(None)
        if rows and not table.num_columns:
            raise self.nothing_in("the request")
        table.validate(full=True)
        parts = table.combine_chunks().to_batches()
        if not parts:
            return pa.RecordBatch.from_pylist([], schema=table.schema)
        batch: pa.RecordBatch = parts[0]
        for number in layout.of_nulls:
            # they take no bytes, and may be of any length
            if len(batch.column(number).values):
                raise InputError(
                    f"column {batch.schema.names[number]!r} has a null inside the list; leave null "
                    "elements out."
                )
        for number in layout.of_views:
            _check_views(batch.schema.names[number], batch.column(number))
        return batch

    def check_rows(self, count: int) -> None:
        """Refuse a request of too many rows.

        Raises:
            InputError: it has more than are taken.
        """
        if count > self._most_rows:
            raise InputError(
                f"the request has {count} rows and at most {self._most_rows} are taken; send them "
                "in several requests."
            )

    def nothing_in(self, what: str) -> InputError:
        """Return the error of rows without a column that is read."""
        return InputError(
            f"{what} has none of the columns {', '.join(map(repr, self.columns))}; give them, with "
            "a value for each row."
        )

    def _layout(self, message: pa.Message, reader: pa.RecordBatchReader) -> _Layout:
        key = message.metadata.to_pybytes()
        known = self._layouts.get(key)  # requests are read in two threads
        if known is not None:
            return known
        schema = reader.schema
        places: dict[str, list[int]] = {}
        for number, name in enumerate(schema.names):
            places.setdefault(name, []).append(number)
        for name in self.columns:
            if len(places.get(name, ())) > 1:
                raise InputError(missing(name, schema, "row 0 of the request"))
        at = [places[name][0] for name in self.columns if name in places]
        fields = [schema.field(number) for number in at]
        for field in fields:
            _check_type(field.name, field.type)
        of_nulls = [
            number
            for number, field in enumerate(fields)
            if is_list(field.type) and pa.types.is_null(field.type.value_type)
        ]
        of_views = [number for number, field in enumerate(fields) if is_list_view(field.type)]
        is_plain = at == list(range(len(schema))) and schema.metadata is None
        layout = _Layout(None if is_plain else at, of_nulls, of_views)
        if len(key) <= _LARGEST_KEPT:
            if len(self._layouts) >= _MOST_KEPT:
                self._layouts.clear()
            self._layouts[key] = layout
        return layout


def _check_buffers(message: pa.Message) -> None:
    """Check by the header of a message that its buffers are neither compressed nor shared.

    The header is a flatbuffer of Arrow's Message, which Arrow has verified: a table holds the
    distance to its list of fields, and that the place of each field, or 0.

    Raises:
        InputError: the buffers are compressed or share bytes, or it adds to a dictionary.
    """
    if message.type not in ("record batch", "dictionary"):
        return
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
        grows = field(batch, 2)
        if grows and header[grows]:
            # every batch after it would have a copy of the whole
            raise InputError("the request adds to a dictionary; send each dictionary whole.")
        batch = follow(field(batch, 1))
    if field(batch, 3):
        raise InputError("the request is compressed; send the Arrow stream as it is.")
    buffers = field(batch, 2)
    if not buffers:
        return
    listed = follow(buffers)
    count = 2 * struct.unpack_from("<I", header, listed)[0]
    # place and size of each; writers have them in order
    pairs = np.frombuffer(header, "<i8", count, listed + 4).reshape(-1, 2)
    pairs = pairs[pairs[:, 1] != 0]
    if _overlap(pairs[:, 0], pairs.sum(1)):
        raise InputError(
            "buffers of the request share bytes, so that it stands for more than it is; write "
            "every column by itself."
        )


def _check_views(name: str, lists: pa.Array) -> None:
    """Check that no two lists of a column share values; all of them were validated."""
    sizes = lists.sizes.to_numpy().astype(np.int64)
    held = (sizes > 0) & lists.is_valid().to_numpy(zero_copy_only=False)
    starts = lists.offsets.to_numpy().astype(np.int64)[held]
    if _overlap(starts, starts + sizes[held]):
        raise InputError(
            f"lists of column {name!r} of the request share values, so that it stands for more "
            "than it is; write every list by itself."
        )


def _overlap(starts: NDArray[Any], ends: NDArray[Any]) -> bool:
    """Return True if two of some stretches, none of which is empty, have a place in common."""
    if not bool((starts[1:] < ends[:-1]).any()):
        return False
    order = starts.argsort()
    return bool((starts[order][1:] < ends[order][:-1]).any())


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
