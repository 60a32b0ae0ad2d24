"""From dataclasses to plain data; `reading` gives the same values back.

In both notations None is left out where the field is None without the file. Elsewhere a run file
has the word "none", since TOML has no null; it leaves fields that hold code out while they have
their default. JSON has every other field, in their order.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_origin

from rayrec.errors import ConfigError
from rayrec.fields import kinds
from rayrec.fields.kinds import NONE, TYPE


def table_of(value: Any, base: Any = None, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass as a table of plain data.

    Args:
        base: the value that a reader takes where the table says nothing, or None.
        leave_out: fields that are said elsewhere.
    Raises:
        ConfigError: a field holds what a run file cannot say.
    """
    kind = type(value)
    types, table = kinds.field_types(kind), dict[str, Any]()
    for field in dataclasses.fields(kind):
        name = field.name
        if name not in types or name in leave_out:
            continue
        default = getattr(base, name) if type(base) is kind else kinds.default_of(field)
        item = getattr(value, name)
        if item is None and default is None:
            continue
        if item is None:
            table[name] = NONE
        elif not (kinds.is_code(types[name]) and item == default):
            table[name] = _plain(item, types[name], default, f"{kind.__name__}.{name}")
    return table


def _plain(value: Any, kind: Any, base: Any, name: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        table = table_of(value, base)
        # A reader takes the class of the base, or the only one that there is.
        if type(value) is not type(base) and len(kinds.variants(kind)) > 1:
            return {TYPE: type(value).__name__, **table}
        return table
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        of_values = next(
            filter(None, map(kinds.mapping_types, kinds.alternatives(kind))), (str, Any)
        )
        return {key: _plain(one, of_values[1], None, name) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = next(filter(None, map(kinds.item_types, kinds.alternatives(kind))), (Any, ...))
        of_each = [items[0]] * len(value) if items[-1] is ... else list(items)
        return [_plain(one, of, None, name) for one, of in zip(value, of_each, strict=True)]
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, bool | int | float | str) or (
        value == NONE and kinds.takes_none(kind)
    ):
        raise ConfigError(f"{name}={value!r} cannot be said in a run file; use the Python API.")
    # A reader makes a float of it, and would write that otherwise.
    as_float = type(value) is int and float in kinds.alternatives(kind)
    return float(value) if as_float and int not in kinds.alternatives(kind) else value


def record_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as data for JSON, which `reading.read_record` reads.

    Values that `json` writes as a reader wants them, such as tuples of numbers, stay as they are.
    """
    kind: Any = type(value)
    return _record_writer(kind)(value)


@cache
def _record_writer(kind: Any) -> Callable[[Any], dict[str, Any]]:
    types = kinds.field_types(kind)
    fields = [
        (field.name, _writer(types[field.name]), kinds.default_of(field) is None)
        for field in dataclasses.fields(kind)
        if field.name in types and not kinds.is_code(types[field.name])
    ]

    def write(value: Any) -> dict[str, Any]:
        record = {}
        for name, one, is_none_without in fields:
            item = getattr(value, name)
            if item is not None:
                record[name] = item if one is None else one(item)
            elif not is_none_without:
                record[name] = None
        return record

    return write


def _writer(kind: Any) -> Callable[[Any], Any] | None:
    """What turns a value of a type into data; None where it is data."""
    ones = kinds.alternatives(kind)
    if len(ones) > 1:
        return None if not any(map(_writer, ones)) else _written
    items, pair = kinds.item_types(ones[0]), kinds.mapping_types(ones[0])
    if items is not None and ones[0] is not range:
        is_set = (get_origin(ones[0]) or ones[0]) in (set, frozenset)
        return sorted if is_set else _writer_of_items(items)
    if pair is not None and (pairs := kinds.pairs_type(pair)) is not None:
        write = _writer(pairs) or list
        return lambda table: write(table.items())
    if pair is not None:
        return _writer_of_mapping(_writer(pair[1]))
    if dataclasses.is_dataclass(ones[0]) or kinds.is_enum(ones[0]) or ones[0] in (range, Path):
        return _written
    return None


def _writer_of_mapping(one: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    if one is None:
        return dict
    return lambda table: {key: one(each) for key, each in table.items()}


def _writer_of_items(items: tuple[Any, ...]) -> Callable[[Any], Any] | None:
    of_each = [_writer(one) for one in items if one is not ...]
    first = of_each[0] if of_each else None
    if first is not None and items[-1] is ...:
        return lambda values: [first(each) for each in values]
    if not any(of_each):
        return None
    return lambda values: [
        each if one is None else one(each) for one, each in zip(of_each, values, strict=True)
    ]


def _written(value: Any) -> Any:
    """One of several types as data."""
    if dataclasses.is_dataclass(value):
        return record_of(value)
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, range):
        return [value.start, value.stop]
    return str(value) if isinstance(value, Path) else value


def json_data(value: Any) -> Any:
    """Return any value as data for JSON, for people and pages; no reader makes the value of it.

    Numbers that are not finite are null, and code is its name.
    """
    if isinstance(value, Enum):
        return json_data(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): json_data(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_data(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {one.name: json_data(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {"type": type(value).__name__, **named}
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return json_data(value.item())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # The repr of code has its address, which says nothing of the run.
    return getattr(value, "__qualname__", None) or type(value).__qualname__
