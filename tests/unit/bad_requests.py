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
        request_bytes(pa.Table.from_batches(one.to_batches(max_chunksize=3))),
        # without a schema
        list(pa.ipc.MessageReader.open_stream(request_bytes(one)))[1].serialize().to_pybytes(),
    ]


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
