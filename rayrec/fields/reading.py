"""From plain data, as `tomllib` and `json` give them, to dataclasses, with every type checked.

What a type takes is worked out once, from its annotation, as a function from the data to the value.
Run files and JSON are read by the same functions; what they say differently is a `Notation`: a
table of a run file overrides the value which its field has without it, where the default is a
dataclass, and "none" is None; null in JSON is None, or a key that is not given. Beside what people
write, a `range` is [start, stop], and a NamedTuple the list of its fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from rayrec.errors import RayrecError
from rayrec.fields import kinds
from rayrec.fields.kinds import NONE, TYPE
from rayrec.fields.misfit import JSON, TOML, Misfit, Notation, wrong

MAX_INTEGER = 2**63 - 1
_MISSING = dataclasses.MISSING
# the data and the value without them -> what the field holds
_Read = Callable[[Any, Any], Any]


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
def _record_reader(kind: Any) -> _Read:
    return _reader(kind, JSON)


def _reader(kind: Any, notation: Notation) -> _Read:
    """The function that reads a type."""
    ones, classes = kinds.alternatives(kind), _classes(kind, notation)
    ways = [
        (_form(one), _reader_of_one(one, kind, notation))
        for one in ones
        if not _classes(one, notation)
    ]
    if classes:
        ways.append((_is_table, _reader_of_table(classes, kind, notation)))
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
    return [one for one in kinds.alternatives(kind) if dataclasses.is_dataclass(one)]


def _reader_of_words(read: _Read, kind: Any) -> _Read:
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
    ways: list[tuple[Callable[[Any], bool], _Read]], kind: Any, notation: Notation
) -> _Read:
    def read(value: Any, base: Any) -> Any:
        for fits, way in ways:
            if fits(value):
                return way(value, base)
        raise notation.wrong(value, kind)

    return read


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _form(kind: Any) -> Callable[[Any], bool]:
    """Whether a value has the outer form of a type, which says what else to check."""
    if kind is Any:
        return lambda value: True
    if get_origin(kind) is Literal:
        values = {(type(one), one) for one in get_args(kind)}
        return lambda value: isinstance(value, str | int) and (type(value), value) in values
    if kinds.is_enum(kind):
        return lambda value: _member(kind, value) is not None
    if kind in kinds.SCALARS:
        classes = {float: (int, float), Path: (str,)}.get(kind, (kind,))
        return lambda value: type(value) in classes
    if kinds.item_types(kind) is not None:
        return lambda value: isinstance(value, list)
    return _is_table


def _member(kind: Any, value: Any) -> Any:
    """The member of an enum that a word means, by its value or, in any case, by its name."""
    if not isinstance(value, str):
        return None
    known = (one for one in kind if value == one.value or value.upper() == one.name.upper())
    return next(known, None)


def _reader_of_one(kind: Any, whole: Any, notation: Notation) -> _Read:
    """The function that reads a type which is no table.

    Args:
        whole: the union that it is a member of, for errors.
    """
    items, pair = kinds.item_types(kind), kinds.mapping_types(kind)
    if items is not None:
        items = (int, int) if kind is range else items
        return _reader_of_items(kind, items, whole, notation)
    if pair is not None:
        return _reader_of_mapping(pair[1], whole, notation)
    if kind is int:
        return _reader_of_integers(whole, notation)
    if kind is float:
        return _reader_of_numbers(whole, notation)
    fits = _form(kind)
    make = {Path: Path}.get(kind)
    if kinds.is_enum(kind):

        def make(value: Any) -> Any:
            return _member(kind, value)

    def read(value: Any, base: Any) -> Any:
        if not fits(value):
            raise notation.wrong(value, whole)
        return value if make is None else make(value)

    return read


def _reader_of_integers(whole: Any, notation: Notation) -> _Read:
    def read(value: Any, base: Any) -> Any:
        # true is an int to `isinstance`
        if type(value) is not int:
            raise notation.wrong(value, whole)
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise wrong(value, "a whole number of 64 bits")
        return value

    return read


def _reader_of_numbers(whole: Any, notation: Notation) -> _Read:
    def read(value: Any, base: Any) -> Any:
        if type(value) is not float and type(value) is not int:
            raise notation.wrong(value, whole)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        # 1e999 reads as infinity in JSON, and run files may say inf
        if not math.isfinite(number) and (type(value) is int or not notation.lends):
            raise wrong(value, "a finite number")
        return number

    return read


def _reader_of_items(kind: Any, items: tuple[Any, ...], whole: Any, notation: Notation) -> _Read:
    make, count = _maker(kind, notation), None if items[-1] is ... else len(items)
    of_each = [one for one in items if one is not ...]
    reads = [_reader(one, notation) for one in of_each]
    are_integers = set(of_each) == {int}
    sames = [_as_it_is(one) for one in of_each]

    def read(values: Any, base: Any) -> Any:
        if type(values) is not list or count not in (None, len(values)):
            raise notation.wrong(values, whole)
        if are_integers:  # most of large files, so they are looked at without a call for each
            for value in values:
                if type(value) is not int or not -MAX_INTEGER <= value <= MAX_INTEGER:
                    break
            else:
                return make(values)
        made: list[Any] = []
        try:
            if count is None:
                (way,) = reads
                for value in values:
                    made.append(way(value, None))
            else:
                for way, same, value in zip(reads, sames, values, strict=True):
                    fits = type(value) is same and (same is not int or abs(value) <= MAX_INTEGER)
                    made.append(value if fits else way(value, None))
        except Misfit as error:
            raise error.at(len(made)) from error.__cause__
        return make(made)

    return read


def _maker(kind: Any, notation: Notation) -> Callable[[list[Any]], Any]:
    """What makes a collection of a list of its items."""
    origin: Any = get_origin(kind) or kind
    if origin is range:
        return lambda ends: range(*ends)
    if hasattr(origin, "_make"):
        made: Callable[[list[Any]], Any] = origin._make
        return made
    if origin in (list, set, frozenset):
        return origin  # type: ignore[no-any-return]
    # JSON gives what is any sequence as a list
    return tuple if notation.lends or issubclass(origin, tuple) else list


def _reader_of_mapping(kind: Any, whole: Any, notation: Notation) -> _Read:
    one = _reader(kind, notation)

    def read(table: Any, base: Any) -> Any:
        if not isinstance(table, Mapping):
            raise notation.wrong(table, whole)
        if kind is Any:
            return dict(table)
        made, key = {}, ""
        try:
            for key, value in table.items():
                made[key] = one(value, None)
        except Misfit as error:
            raise error.at(key) from error.__cause__
        return made

    return read


def _reader_of_table(classes: list[type], whole: Any, notation: Notation) -> _Read:
    if not notation.lends and len(classes) == 1:
        return _reader_of_record(classes[0], whole)

    def read(table: Any, base: Any) -> Any:
        if not isinstance(table, Mapping):
            raise notation.wrong(table, whole)
        return _read_table(classes, table, base, notation)

    return read


def _reader_of_record(kind: type, whole: Any) -> _Read:
    """The way of most of JSON: a table of one class that fits it.

    All others go through `_read_table`, which finds out what is wrong.
    """
    # worked out when the first is read, since a dataclass may hold others of its kind
    ways: list[tuple[str, _Read, type | None]] = []
    needed: set[str] = set()

    def read(table: Any, base: Any) -> Any:
        if type(table) is not dict:
            raise JSON.wrong(table, whole)
        if not ways:
            slots = _record_shape(kind).slots
            ways.extend((one.name, one.read, _as_it_is(one.kind)) for one in slots)
            needed.update(one.name for one in slots if _is_needed(one.field))
        values = {}
        try:
            for name, way, same in ways:
                if name in table:
                    value = table[name]
                    fits = type(value) is same and (same is not int or abs(value) <= MAX_INTEGER)
                    values[name] = value if fits else way(value, None)
            # as many values as keys: none is unknown
            if len(values) == len(table) and (len(values) == len(ways) or needed <= values.keys()):
                return kind(**values)
        except (RayrecError, TypeError, ValueError):
            pass
        return _read_table([kind], table, base, JSON)

    return read


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    """Whether JSON must say a field."""
    return kinds.default_of(field) is _MISSING or bool(field.metadata)


def _as_it_is(kind: Any) -> type | None:
    """The class whose values a field takes as they are, or None; an int must not be too large."""
    return kind if kind in (str, bool, int) else None


class _Slot(NamedTuple):
    """A field of a dataclass.

    Attributes:
        drops_null: null stands for a key that is not given.
    """

    name: str
    kind: Any
    read: _Read
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
            needed = kinds.default_of(field) is _MISSING
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
        kind, given = _choose(classes, table, base, notation)
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
            value = given.get(name, _MISSING)
            if value is not _MISSING and not (value is None and drops_null):
                own = _lent(field, base, kind) if notation.lends else None
                values[name] = read(value, own)
    except Misfit as error:
        raise error.at(name) from error.__cause__
    if len(values) < len(shape.slots):
        for name, one, _, field, _ in shape.slots:
            if name not in values:
                value = _lent(field, base, kind)
                if value is _MISSING or (not notation.lends and _is_needed(field)):
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


def _choose(
    classes: list[type], table: Mapping[str, Any], base: Any, notation: Notation
) -> tuple[type, Mapping[str, Any]]:
    """The class that a table means, and the table without the key that says so."""
    known = {one: set(kinds.field_types(one)) for one in classes}
    if not notation.lends:
        return max(classes, key=lambda one: len(known[one] & set(table))), table
    by_name = {one.__name__: one for one in classes}
    if TYPE in table and not any(TYPE in names for names in known.values()):
        name = table[TYPE]
        if name not in by_name:
            raise wrong(name, f"one of {', '.join(by_name)}").at(TYPE)
        return by_name[name], {key: value for key, value in table.items() if key != TYPE}
    own = type(base) if type(base) in classes else None
    if len(classes) == 1 or (own is not None and set(table) <= known[own]):
        return own or classes[0], table
    fitting = [one for one in classes if _takes(one, table)]
    if len(fitting) == 1:
        return fitting[0], table
    if own is not None and not fitting:
        return own, table  # whose error names the key that is wrong
    says = f"needs {TYPE}, which says what it is: one of {', '.join(by_name)}."
    raise Misfit(says, "keys")


def _takes(kind: type, table: Mapping[str, Any]) -> bool:
    """Whether a class has all keys of a table, and needs no other."""
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.init and kinds.default_of(field) is _MISSING
    }
    return needed <= set(table) <= set(kinds.field_types(kind))
