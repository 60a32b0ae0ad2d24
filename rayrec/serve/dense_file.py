"""The dense part of an artifact or a delta as bytes: tensors by name, in the layout of safetensors.

    8 bytes           length of the header, little-endian
    header            JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    the rest          the values, one tensor after another

Nothing in it is code, and nothing is unpickled. Artifacts of version 1 have a file of torch.save in
its place.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import cast

import torch
from torch import Tensor

from rayrec.errors import ArtifactError
from rayrec.storage import one_line

_AGAIN = "Copy it again, or export the checkpoint again."
_ZIP = b"PK"  # begins a file of torch.save; as a length it would be of a header beyond all bounds
_MOST_HEADER = 16 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def dense_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a dense part; equal tensors give equal bytes.

    Raises:
        ArtifactError: a tensor is of a type that the layout does not have.
    """
    header, parts, end = dict[str, object](), list[bytes](), 0
    # wide types first, so that every tensor lies at a multiple of its element's size
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.dtype not in _NAMES:
            raise ArtifactError(
                f"{name!r} is of type {tensor.dtype}, which an artifact does not hold; it holds "
                f"{', '.join(str(one).removeprefix('torch.') for one in _NAMES)}."
            )
        part = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(part)],
        }
        parts.append(part)
        end += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def loaded_dense(content: bytes, where: str, *, trusted: bool = True) -> dict[str, Tensor]:
    """Read the tensors of a dense part, by their names in the model.

    Args:
        where: the file, for messages.
        trusted: allow torch's unpickler for a file of version 1.
    Raises:
        ArtifactError: the file is damaged, or of version 1 and not trusted.
    """
    if content.startswith(_ZIP):
        return _of_version_1(content, where, trusted)
    try:
        return _parsed(content)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ArtifactError(f"{where} cannot be loaded: {one_line(error)}. {_AGAIN}") from None


def _parsed(content: bytes) -> dict[str, Tensor]:
    length = int.from_bytes(content[:8], "little")
    if not 8 < 8 + length <= min(len(content), _MOST_HEADER):
        raise ValueError(f"its header would have {length} of {len(content)} bytes")
    header, start = json.loads(content[8 : 8 + length]), 8 + length
    body, tensors = bytearray(content[start:]), {}
    for name, said in header.items():
        dtype, shape, (first, last) = _TYPES[said["dtype"]], said["shape"], said["data_offsets"]
        numbers = [*shape, first, last]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name!r} has shape {shape} at {first} to {last}")
        count = math.prod(shape)
        if last > len(body) or last - first != count * dtype.itemsize:
            raise ValueError(f"{name!r} of shape {shape} does not fill bytes {first} to {last}")
        values = torch.frombuffer(body[first:last], dtype=dtype) if count else torch.empty(0)
        tensors[name] = values.to(dtype).view(shape)
    return tensors


def _of_version_1(content: bytes, where: str, trusted: bool) -> dict[str, Tensor]:
    if not trusted:
        raise ArtifactError(
            f"{where} is of artifact version 1 and would be unpickled, and the artifact is not "
            "trusted. Export the checkpoint again with this rayrec, or trust the artifact."
        )
    try:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise ArtifactError(f"{where} cannot be loaded: {one_line(error)}. {_AGAIN}") from None
    return cast("dict[str, Tensor]", loaded)
