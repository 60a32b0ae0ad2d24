"""Values that ranks tell each other: plain data, of which nothing is unpickled.

torch's object collectives unpickle what a peer sends, which runs whatever code it names. Here a
value is JSON, followed by the raw bytes of its tensors and Arrow tables. It may hold what JSON has,
scalars of numpy, tuples, dicts with any keys, ranges, bytes, tensors, tables, and dataclasses,
NamedTuples and enums of rayrec. A text, a list or a tuple of another class becomes a plain one. A
gather costs one pass over the value, a small collective for the sizes, and one that is as long as
the longest value.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rayrec.comm.choose import device_of
from rayrec.comm.process_group import gather_ints
from rayrec.errors import CommError

_HEADER = struct.Struct("<q")
_PACKAGE = "rayrec."


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, on every rank."""
    sent, sizes = _sent(value, group)
    width = max(sizes)
    everyone = sent.new_empty(len(sizes) * width)
    dist.all_gather(list(everyone.split(width)), _padded(sent, width), group=group)
    return [_decoded(row, size) for row, size in zip(everyone.split(width), sizes, strict=True)]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks of the default group on rank 0, [] on the others."""
    sent, sizes = _sent(value, None)
    width, rows = max(sizes), None
    if dist.get_rank() == 0:
        rows = list(sent.new_empty(len(sizes) * width).split(width))
    dist.gather(_padded(sent, width), rows)
    return [_decoded(row, size) for row, size in zip(rows or [], sizes, strict=False)]


def broadcast(value: Any, source: int) -> Any:
    """Return rank `source`'s value on every rank of the default group; others may give anything."""
    sent, sizes = _sent(value if dist.get_rank() == source else None, None)
    if dist.get_rank() != source:
        sent = sent.new_empty(sizes[source])
    dist.broadcast(sent, source)
    return _decoded(sent, sizes[source])


def encode(value: Any) -> bytearray:
    """Return a value as bytes.

    Raises:
        TypeError: it holds something of another kind.
    """
    buffers: list[bytes | memoryview] = []
    text = json.dumps(_plain(value, buffers), separators=(",", ":")).encode()
    sizes = [len(text), *map(len, buffers)]
    head = json.dumps(sizes).encode()
    return bytearray().join([_HEADER.pack(len(head)), head, text, *buffers])


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the value that `encode` was given."""
    view = memoryview(data)
    (length,) = _HEADER.unpack_from(view)
    start = _HEADER.size + length
    parts = []
    for size in json.loads(bytes(view[_HEADER.size : start])):
        parts.append(view[start : start + size])
        start += size
    return _value(json.loads(bytes(parts[0])), parts[1:])


def _sent(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return this rank's value as a tensor of bytes, and the sizes of all ranks' in bytes."""
    device = device_of(group, True)
    sent = torch.frombuffer(encode(value), dtype=torch.uint8).to(device)
    return sent, [size for (size,) in gather_ints([len(sent)], group, device)]


def _padded(sent: Tensor, width: int) -> Tensor:
    return torch.cat([sent, sent.new_zeros(width - len(sent))])


def _decoded(row: Tensor, size: int) -> Any:
    return decode(row[:size].cpu().numpy().data)


def _plain(value: Any, buffers: list[bytes | memoryview]) -> Any:
    """A value as JSON has it: lists and what has no parts as they are, else {kind: parts}."""

    def inner(one: Any) -> Any:
        return _plain(one, buffers)

    def buffer(data: bytes | memoryview) -> int:
        buffers.append(data)
        return len(buffers) - 1

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [inner(one) for one in value]
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), buffer(raw.numpy().data)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bytes | bytearray):
        return {"bytes": buffer(bytes(value))}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Mapping):
        return {"dict": [[inner(key), inner(one)] for key, one in value.items()]}
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    is_ours = name.startswith(_PACKAGE)
    if isinstance(value, Enum) and is_ours:
        return {"enum": [name, value.name]}
    if isinstance(value, str):
        # tables may have names of an enum of the user's
        return str.__str__(value)
    if dataclasses.is_dataclass(value) and is_ours:
        given = [one.name for one in dataclasses.fields(value) if one.init]
        return {"fields": [name, {one: inner(getattr(value, one)) for one in given}]}
    if isinstance(value, tuple):
        parts = [inner(one) for one in value]
        return {"named": [name, parts]} if is_ours else {"tuple": parts}
    if type(value).__name__ == "Table":
        import pyarrow as pa

        if isinstance(value, pa.Table):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, value.schema) as stream:
                stream.write_table(value)
            return {"table": buffer(sink.getvalue().to_pybytes())}
    raise TypeError(f"ranks tell each other plain values, and {name} is none")


def _value(plain: Any, buffers: list[memoryview]) -> Any:
    """Return the value that `_plain` took apart."""
    if isinstance(plain, list):
        return [_value(one, buffers) for one in plain]
    if isinstance(plain, str):
        # keys of an optimizer's state are interned, and pickle writes one text of these once
        return sys.intern(plain)
    if not isinstance(plain, dict):
        return plain
    ((kind, parts),) = plain.items()
    return _KINDS[kind](parts, buffers)


def _tensor(parts: Any, buffers: list[memoryview]) -> Tensor:
    dtype, shape, number = parts
    kind = _dtype(dtype)
    if not len(buffers[number]):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(buffers[number]), dtype=kind).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CommError(f"a rank sent a tensor of type {name!r}, which torch does not have")
    return found


def _table(number: int, buffers: list[memoryview]) -> Any:
    import pyarrow as pa

    # the bytes are of a buffer that is used again
    return pa.ipc.open_stream(pa.py_buffer(bytes(buffers[number]))).read_all()


def _class(name: str) -> type:
    """A dataclass, NamedTuple or enum of rayrec; a peer may name no other."""
    module, _, path = name.partition(":")
    found: Any = None
    if name.startswith(_PACKAGE):
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part, None)
    if (
        not isinstance(found, type)
        or found.__module__ != module
        or not (dataclasses.is_dataclass(found) or issubclass(found, tuple | Enum))
    ):
        raise CommError(f"a rank sent a value of the kind {name!r}, which is no data of rayrec")
    return found


_KINDS: dict[str, Callable[[Any, list[memoryview]], Any]] = {
    "tensor": _tensor,
    "dtype": lambda name, buffers: _dtype(name),
    "bytes": lambda number, buffers: bytes(buffers[number]),
    "range": lambda parts, buffers: range(*parts),
    "dict": lambda parts, buffers: {
        _value(key, buffers): _value(one, buffers) for key, one in parts
    },
    "fields": lambda parts, buffers: _class(parts[0])(
        **{name: _value(one, buffers) for name, one in parts[1].items()}
    ),
    "tuple": lambda parts, buffers: tuple(_value(one, buffers) for one in parts),
    "named": lambda parts, buffers: _class(parts[0])(*(_value(one, buffers) for one in parts[1])),
    "enum": lambda parts, buffers: _class(parts[0])[parts[1]],  # type: ignore[index]
    "table": _table,
}
