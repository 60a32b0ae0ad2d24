"""Bytes that are no request, made of some that are."""

from __future__ import annotations

import random
import struct

import pyarrow as pa

from rayrec.serve.wire import request_bytes


def streams(rows: pa.Table) -> list[bytes]:
    """Requests of rows in several types, lengths and numbers of batches; the last is cut short."""
    one = rows.combine_chunks()
    text = one.set_column(
        one.schema.get_field_index("user"), "user", one["user"].dictionary_encode()
    )
    return [
        request_bytes(one),
        request_bytes(one[:1]),
        request_bytes(one[:0]),
        request_bytes(text),
        _stream(one.to_batches(max_chunksize=3)),
        # without a schema
        list(pa.ipc.MessageReader.open_stream(request_bytes(one)))[1].serialize().to_pybytes(),
    ]


def _stream(batches: list[pa.RecordBatch], **options: bool) -> bytes:
    sink = pa.BufferOutputStream()
    given = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batches[0].schema, options=given) as writer:
        for batch in batches:
            writer.write(batch)
    return sink.getvalue().to_pybytes()


def in_batches(names: list[str], count: int) -> bytes:
    """Columns of lists, in so many record batches of one row."""
    lists = pa.array([[1, 2]])
    return _stream([pa.RecordBatch.from_arrays([lists] * len(names), names=names)] * count)


def sharing(names: list[str]) -> bytes:
    """Two columns of numbers, both of which have the bytes of the first."""
    numbers = pa.array([0.5] * 32)
    data = _stream([pa.RecordBatch.from_arrays([numbers, numbers], names=names)])
    # the header has the places and the sizes of four buffers
    places = struct.pack("<8q", 0, 0, 0, 256, 256, 0, 256, 256)
    assert data.count(places) == 1
    return data.replace(places, struct.pack("<8q", 0, 0, 0, 256, 256, 0, 0, 256))


def with_delta() -> bytes:
    """A column whose dictionary grows in the second batch."""
    kind = pa.dictionary(pa.int32(), pa.string())
    words = [pa.array(["a"]), pa.array(["a", "b"])]
    arrays = [pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), each) for each in words]
    batches = [pa.RecordBatch.from_arrays([each.cast(kind)], names=["user"]) for each in arrays]
    return _stream(batches, emit_dictionary_deltas=True)


def mutated(message: bytes, rng: random.Random) -> bytes:
    """A message with random changes, or random bytes."""
    data = bytearray(message)
    how = rng.randrange(7)
    if how == 0:
        return rng.randbytes(rng.randrange(300))
    if how == 1:
        return bytes(data[: rng.randrange(len(data))])
    if how == 2:
        at, size = rng.randrange(len(data)), rng.randrange(1, 64)
        del data[at : at + size]
    elif how == 3:
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.randrange(1, 64))
    elif how == 4:
        # a number of the headers or of the columns, as small and large as numbers are
        at = rng.randrange(len(data) - 8) // 4 * 4
        value = rng.choice([0, 1, -1, 2**31 - 1, -(2**31), rng.randrange(-(2**31), 2**31)])
        struct.pack_into("<i", data, at, value)
    elif how == 5:
        struct.pack_into("<q", data, rng.randrange(len(data) - 8) // 8 * 8, rng.getrandbits(62))
    else:
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)
