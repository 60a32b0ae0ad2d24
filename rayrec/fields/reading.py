"""From plain data, as `tomllib` and `json` give them, to dataclasses, with every type checked.

What a type takes is worked out once, from its annotation, as a function from the data to the value.
Run files and JSON are read by the same functions; what they say differently is a `Notation`: a
table of a run file overrides the value which its field has without it, where the default is a
dataclass, and "none" is None; null in JSON is None, or a key that is not given. Beside what people
write, a `range` is [start, stop], a NamedTuple the list of its fields, and a mapping whose keys are
no texts the list of its items.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from rayrec.errors import RayrecError
from rayrec.fields import kinds
from rayrec.fields.choosing import chosen
from rayrec.fields.items import reader_of_items, reader_of_mapping
from rayrec.fields.kinds import NONE
from rayrec.fields.misfit import JSON, TOML, Misfit, Notation
from rayrec.fields.scalars import Read, form_of, is_table, reader_of_scalar

MISSING = dataclasses.MISSING


def read_table(
    kind: type,
    table: Mapping[str, Any],
    section: str,
    source_of: Callable[[tuple[str, ...]], str],
    base: Any = None,
    **fixed: Any,
) -> Any:
    """A dataclass of the keys of a section of a run file.

    Args:
        source_of: who said what stands at a path.
        base: a dataclass whose fields hold where the table says nothing, or None.
        fixed: fields that come from elsewhere; the table may not have them.
    Raises:
        ConfigError: a key is unknown, missing or of another type, or the class refuses a value.
    """
    try:
        return _read_table([kind], table, base, TOML, fixed)
    except Misfit as error:
        raise error.at(section).in_run_file(source_of) from error.__cause__


def read_record(kind: Any, data: Any) -> Any:
    """A value of a type, mostly a dataclass, from the data of JSON.

    Raises:
        Misfit: the data are no such value; its text is one line that begins with the place.
    """
    return _record_reader(kind)(data, None)


@cache
def _record_reader(kind: Any) -> Read:
    return _reader(kind, JSON)


def _reader(kind: Any, notation: Notation) -> Read:
    """The function that reads a type."""
    ones, classes = kinds.alternatives(kind), _classes(kind, notation)
    ways = [
        (form_of(one), _reader_of_one(one, kind, notation))
        for one in ones
        if not _classes(one, notation)
    ]
    if classes:
        ways.append((is_table, _reader_of_table(classes, kind, notation)))
    read = ways[0][1] if len(ways) == 1 else _reader_of_several(ways, kind, notation)
    if notation.lends:
        return _reader_of_words(read, kind)
    if not kinds.takes_none(kind):
        return read
    return lambda value, base: None if value is None else read(value, base)


def _classes(kind: Any, notation: Notation) -> list[type]:
    """The dataclasses that a table may become."""
    if notation.lends:
        return kinds.variants(kind)
    return [one for one in kinds.alternatives(kind) if _is_record(one)]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _reader_of_words(read: Read, kind: Any) -> Read:
    """A reader that takes the words of run files: "none", and one word for a whole table."""
    none, ones = kinds.takes_none(kind), kinds.alternatives(kind)

    def read_word(value: Any, base: Any) -> Any:
        if none and value == NONE:
            return None
        for one in ones:
            made = kinds.of_word(one, value, base)
            if made is not None:
                return made
        return read(value, base)

    return read_word


def _reader_of_several(
    ways: list[tuple[Callable[[Any], bool], Read]], kind: Any, notation: Notation
) -> Read:
    def read(value: Any, base: Any) -> Any:
        for fits, way in ways:
            if fits(value):
                return way(value, base)
        raise notation.wrong(value, kind)

    return read


def _reader_of_one(kind: Any, whole: Any, notation: Notation) -> Read:
    """The function that reads a type which is no table.

    Args:
        whole: the union that it is a member of, for errors.
    """
    items, pair = kinds.item_types(kind), kinds.mapping_types(kind)
    if items is not None:
        items = (int, int) if kind is range else items
        reads = [_reader(one, notation) for one in items if one is not ...]
        return reader_of_items(kind, items, reads, whole, notation)
    if pair is not None and (pairs := kinds.pairs_type(pair)) is not None:
        read = _reader(pairs, notation)
        return lambda given, base: dict(read(given, base))
    if pair is not None:
        return reader_of_mapping(pair[1], _reader(pair[1], notation), whole, notation)
    return reader_of_scalar(kind, whole, notation)


def _reader_of_table(classes: list[type], whole: Any, notation: Notation) -> Read:
    def read(table: Any, base: Any) -> Any:
        if not isinstance(table, Mapping):
            raise notation.wrong(table, whole)
        return _read_table(classes, table, base, notation)

    return read


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    """Whether JSON must say a field."""
    return kinds.default_of(field) is MISSING or bool(field.metadata)


class _Slot(NamedTuple):
    """A field of a dataclass.

    Attributes:
        drops_null: null stands for a key that is not given.
    """

    name: str
    kind: Any
    read: Read
    field: dataclasses.Field[Any]
    drops_null: bool


class _Shape(NamedTuple):
    """The fields of a dataclass that a table may give, and those that hold code."""

    slots: tuple[_Slot, ...]
    known: frozenset[str]
    code: frozenset[str]


def _shape(kind: type, notation: Notation) -> _Shape:
    # of run files it is made anew: which subclasses a field takes depends on what was imported
    return _shape_of(kind, notation) if notation.lends else _record_shape(kind)


@cache
def _record_shape(kind: type) -> _Shape:
    return _shape_of(kind, JSON)


def _shape_of(kind: type, notation: Notation) -> _Shape:
    types = kinds.field_types(kind)
    code = frozenset(name for name, one in types.items() if kinds.is_code(one))
    slots = []
    for field in dataclasses.fields(kind):
        name = field.name
        if name in types and name not in code:
            one = types[name]
            needed = kinds.default_of(field) is MISSING
            drops_null = not (notation.lends or needed or kinds.takes_none(one))
            slots.append(_Slot(name, one, _reader(one, notation), field, drops_null))
    return _Shape(tuple(slots), frozenset(slot.name for slot in slots), code)


def _read_table(
    classes: list[type],
    table: Mapping[str, Any],
    base: Any,
    notation: Notation,
    fixed: Mapping[str, Any] | None = None,
) -> Any:
    """A dataclass of the keys of a table."""
    kind, given = (classes[0], table)
    if notation.lends or len(classes) > 1:
        kind, given = chosen(classes, table, base, notation)
    if notation.lends:
        # a name in a table means what the word alone does
        base = kinds.of_word(kind, given.get("name"), base) or base
    shape = _shape(kind, notation)
    if fixed or not shape.known.issuperset(given):
        _check_keys(given, shape, notation, fixed or {})
    values = dict(fixed or ())
    name = ""
    try:
        for name, _, read, field, drops_null in shape.slots:
            value = given.get(name, MISSING)
            if value is not MISSING and not (value is None and drops_null):
                own = _lent(field, base, kind) if notation.lends else None
                values[name] = read(value, own)
    except Misfit as error:
        raise error.at(name) from error.__cause__
    if len(values) < len(shape.slots):
        for name, one, _, field, _ in shape.slots:
            if name not in values:
                value = _lent(field, base, kind)
                if value is MISSING or (not notation.lends and _is_needed(field)):
                    raise notation.missing_key(name, one)
                values[name] = value
    try:
        return kind(**values)
    except (RayrecError, TypeError, ValueError) as error:
        raise Misfit(str(error), "refusal") from error


def _lent(field: dataclasses.Field[Any], base: Any, kind: type) -> Any:
    """The value of a field without the table."""
    return getattr(base, field.name) if type(base) is kind else kinds.default_of(field)


def _check_keys(
    given: Mapping[str, Any], shape: _Shape, notation: Notation, fixed: Mapping[str, Any]
) -> None:
    known = [slot.name for slot in shape.slots if slot.name not in fixed]
    for key in given:
        if key in shape.code and notation.lends:
            raise Misfit(
                f"has {key}, which holds code that a run file cannot say; use the Python API "
                f"(rayrec.Driver) and pass {key}=... there.",
                "keys",
                key,
            )
        if key not in known:
            raise notation.unknown_key(key, known)
