"""The few protobuf messages of the protocol, written and read without generated code.

deploy/serving/serving.proto has rayrec's own; those of grpc.health.v1 are gRPC's. A message is a
sequence of fields, each of which begins with its number and its kind. Fields that nobody knows are
passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rayrec.errors import InputError

PROTOBUF_TYPE = "application/x-protobuf"
ROWS, USER, K, MASKED = 1, 2, 3, 4  # fields of ScoreRequest
SCORES = 1  # field of ScoreResponse
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


def message(fields: Mapping[int, bytes | int]) -> bytes:
    """Return the bytes of a message; fields that are empty or 0 are left out, as protobuf does."""
    written = bytearray()
    for number, value in fields.items():
        if isinstance(value, int) and value:
            written += _varint(number << 3 | _VARINT) + _varint(value)
        elif isinstance(value, bytes) and value:
            written += _varint(number << 3 | _BYTES) + _varint(len(value)) + value
    return bytes(written)


def fields_of(data: bytes) -> dict[int, bytes]:
    """Return the fields of a message that hold bytes or text, by number; the last of each counts.

    Raises:
        InputError: these are no whole fields.
    """
    return {number: value for number, value in _fields(data) if isinstance(value, bytes)}


def numbers_of(data: bytes) -> dict[int, int]:
    """Return the fields that hold whole numbers of at least 0 or truths, as `fields_of` does."""
    return {number: value for number, value in _fields(data) if isinstance(value, int)}


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    place = 0
    while place < len(data):
        key, place = _number(data, place)
        kind, size = key & 7, 0
        if kind == _VARINT:
            value, place = _number(data, place)
            yield key >> 3, value
        elif kind == _BYTES:
            size, place = _number(data, place)
            yield key >> 3, data[place : place + size]
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise _broken(place)
        place += size
        if place > len(data):
            raise _broken(place - size)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def _number(data: bytes, place: int) -> tuple[int, int]:
    """Read a number of 7 bits a byte, and return it with the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise _broken(place)


def _broken(place: int) -> InputError:
    return InputError(
        f"the request is no protobuf message at byte {place}; send one of "
        "deploy/serving/serving.proto."
    )
