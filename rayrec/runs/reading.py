"""Reads the tables of a run file into dataclasses, with every type checked.

A table overrides the value that the field has without it: where the default of a field is a
dataclass, a table may give some of its keys and keeps the others. Every error names the file or the
`--set` that said it, the table, the key, the value, and what is wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from rayrec.errors import ConfigError, RayrecError
from rayrec.fields import kinds
from rayrec.fields.kinds import NONE, TYPE
from rayrec.fields.typed import shown


class Place(NamedTuple):
    """Place of a value: its path, and the function that returns the source of a path."""

    source_of: Callable[[tuple[str, ...]], str]
    path: tuple[str, ...]

    def __truediv__(self, name: str) -> Place:
        """Return the place of a key or an item below this one."""
        return Place(self.source_of, (*self.path, name))

    def error(self, says: str, key: str | None = None) -> ConfigError:
        """Return an error about the table at this place, or about a key of it."""
        path = self.path if key is None else (*self.path, key)
        return ConfigError(f"{self.source_of(path)}: [{'.'.join(self.path)}] {says}")

    def wrong(self, value: Any, want: str) -> ConfigError:
        """Return an error about the value of the key at this place."""
        told = str(value).lower() if isinstance(value, bool) else shown(value)
        *table, key = self.path
        where = f"[{'.'.join(table)}] " if table else ""
        return ConfigError(
            f"{self.source_of(self.path)}: {where}{key} is {told}; it must be {want}."
        )


def meant(name: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(known)}." if known else "; there are none here."


def read_value(kind: Any, value: Any, place: Place, base: Any = None) -> Any:
    """Read the value of a field, by the type of the field.

    Args:
        kind: the resolved annotation of the field.
        value: value as tomllib returns it.
        base: default value of the field; a dataclass gives its fields as defaults to a table.
    Raises:
        ConfigError: the value does not fit the type, or is refused by the class that holds it.
    """
    if kinds.is_code(kind):
        *table, key = place.path
        raise Place(place.source_of, tuple(table)).error(
            f"has {key}, which holds code that a run file cannot say; use the Python API "
            f"(rayrec.Driver) and pass {key}=... there.",
            key,
        )
    if value == NONE and kinds.takes_none(kind):
        return None
    for one in kinds.alternatives(kind):
        made = kinds.of_word(one, value, base)
        if made is not None:
            return made
    fitting = [one for one in kinds.alternatives(kind) if _fits(one, value)]
    if not fitting:
        raise place.wrong(value, kinds.wanted(kind))
    if kinds.variants(fitting[0]):
        return read_table(kinds.variants(kind), value, place, base)
    return _read_one(fitting[0], value, place)


def _fits(kind: Any, value: Any) -> bool:
    """Return True if a value has the outer form of a type; its items are not checked."""
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(kind))
    if kinds.is_enum(kind):
        return any(value in (member.value, member.name) for member in kind)
    if kind is float:
        return type(value) in (int, float)
    if kind in kinds.SCALARS:
        return type(value) is (str if kind is Path else kind)
    if kinds.item_types(kind) is not None:
        return isinstance(value, list)
    return isinstance(value, Mapping)


def _read_one(kind: Any, value: Any, place: Place) -> Any:
    items, pair = kinds.item_types(kind), kinds.mapping_types(kind)
    if items is not None:
        origin = get_origin(kind) or kind
        make = origin if origin in (list, set, frozenset) else tuple
        return make(_read_items(items, value, place, kind))
    if pair is not None:
        return {key: read_value(pair[1], one, place / key) for key, one in value.items()}
    if kinds.is_enum(kind):
        return next(member for member in kind if value in (member.value, member.name))
    return kind(value) if kind in kinds.SCALARS else value


def _read_items(items: tuple[Any, ...], values: list[Any], place: Place, kind: Any) -> list[Any]:
    of_each = [items[0]] * len(values) if items[-1] is ... else list(items)
    if len(of_each) != len(values):
        raise place.wrong(values, kinds.wanted(kind))
    numbered = enumerate(zip(of_each, values, strict=True), start=1)
    return [read_value(one, value, place / f"item {i}") for i, (one, value) in numbered]


def read_table(
    classes: list[type],
    table: Mapping[str, Any],
    place: Place,
    base: Any = None,
    fixed: Mapping[str, Any] | None = None,
) -> Any:
    """Read a table into a dataclass, which has the keys as fields.

    Args:
        classes: the dataclasses that it may become.
        base: a dataclass whose fields hold where the table says nothing, or None.
        fixed: fields that come from elsewhere; the table may not have them.
    Raises:
        ConfigError: a key is unknown, missing or of another type, or the class refuses a value.
    """
    kind, given = _choose(classes, table, place, base)
    # a name in a table means what the word alone does
    base = kinds.of_word(kind, given.get("name"), base) or base
    types = kinds.field_types(kind)
    known = [name for name in types if name not in (fixed or {})]
    for key in given:
        if key not in known:
            raise place.error(f"has {key}{meant(key, known)}", key)
    values = dict(fixed or {})
    for field in dataclasses.fields(kind):
        if field.name not in known:
            continue
        default = kinds.default_of(field)
        if type(base) is kind:
            default = getattr(base, field.name)
        if field.name in given:
            below = place / field.name
            values[field.name] = read_value(types[field.name], given[field.name], below, default)
        elif default is dataclasses.MISSING:
            raise place.error(f"needs {field.name}: {kinds.wanted(types[field.name])}.")
        else:
            values[field.name] = default
    try:
        return kind(**values)
    except (RayrecError, TypeError, ValueError) as error:
        raise place.error(str(error)) from error


def _choose(
    classes: list[type], table: Mapping[str, Any], place: Place, base: Any
) -> tuple[type, Mapping[str, Any]]:
    """Return the class that a table means, and the table without the key that names it."""
    by_name = {one.__name__: one for one in classes}
    if TYPE in table and not any(TYPE in kinds.field_types(one) for one in classes):
        name = table[TYPE]
        if name not in by_name:
            raise (place / TYPE).wrong(name, f"one of {', '.join(by_name)}")
        return by_name[name], {key: value for key, value in table.items() if key != TYPE}
    own = type(base) if type(base) in classes else None
    if len(classes) == 1 or (own is not None and set(table) <= set(kinds.field_types(own))):
        return own or classes[0], table
    fitting = [one for one in classes if _takes(one, table)]
    if len(fitting) == 1:
        return fitting[0], table
    if own is not None and not fitting:
        return own, table  # whose error names the key that is wrong
    raise place.error(f"needs {TYPE}, which says what it is: one of {', '.join(by_name)}.")


def _takes(kind: type, table: Mapping[str, Any]) -> bool:
    """Return True if a class has all keys of a table as fields, and requires no others."""
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.init and kinds.default_of(field) is dataclasses.MISSING
    }
    return needed <= set(table) <= set(kinds.field_types(kind))
