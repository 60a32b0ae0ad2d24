"""JSON that people may write: doubled keys and NaN are refused, which `json.loads` lets through."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from rayrec.errors import RayrecError
from rayrec.fields.misfit import Misfit
from rayrec.fields.reading import read_record

T = TypeVar("T")
_NAMES: dict[type, str] = {list: "array", str: "string", bool: "boolean", type(None): "null"}
_NAMES |= {int: "integer", float: "number"}


def json_object(text: str, source: str, error: type[RayrecError]) -> dict[str, Any]:
    """The object that a text holds.

    Raises:
        error: it is not JSON, not an object, has a doubled key or NaN; names `source`.
    """
    try:
        data = json.loads(text, object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except Misfit as misfit:
        raise error(f"{source}: {misfit}") from None
    except (ValueError, RecursionError) as odd:
        raise error(f"{source} is not valid JSON: {odd or 'nested too deeply'}.") from None
    if not isinstance(data, dict):
        raise error(f"{source} holds a JSON {_NAMES[type(data)]}, expected an object.")
    return data


def of_json(kind: Callable[..., T], data: Any, source: str, error: type[RayrecError]) -> T:
    """The record that data of JSON hold.

    Args:
        kind: its dataclass.
        source: name of the file, for errors.
    Raises:
        error: one line with the file and the place in it, such as `tables[3].columns`.
    """
    try:
        record: T = read_record(kind, data)
    except Misfit as misfit:
        raise error(misfit.in_file(source)) from None
    return record


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise Misfit(f"the key {key!r} occurs twice in one object.", "refusal")
        out[key] = value
    return out


def _no_constant(name: str) -> float:
    raise Misfit(f"{name} is no number of JSON.", "refusal")
