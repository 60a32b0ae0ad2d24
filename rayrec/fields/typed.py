"""Every field of an options dataclass checked by its annotation, when the object is made.

A field takes what its annotation says and the words that run files have for it: the name of a
member of an enum, a list for a tuple, and one word where a class makes itself of a word
(`of_word`). These become what the annotation says, so that the code behind sees one form. Whether a
number is in its range is left to the class. It costs some microseconds an object.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args, get_origin

from rayrec.errors import ConfigError
from rayrec.fields import kinds

MAX_SHOWN = 60  # characters of a wrong value
_UNFIT = object()


def check_fields(options: Any) -> None:
    """Check the fields of a dataclass by their annotations, and put their words into form.

    Raises:
        ConfigError: names the class, the field, its value and what it takes.
    """
    owner: Any = type(options)
    for name, kind, default, classes in _fields_of(owner):
        value = getattr(options, name)
        if type(value) in classes:
            continue
        taken = _taken(kind, value, default)
        if taken is _UNFIT:
            raise _wrong(owner.__name__, name, value, kind)
        if taken is not value:
            object.__setattr__(options, name, taken)


class _Field(NamedTuple):
    """Field with the classes whose values it takes unchanged, since most values are of these."""

    name: str
    kind: Any
    default: Any
    classes: frozenset[type]


@cache
def _fields_of(kind: Any) -> list[_Field]:
    defaults = {field.name: kinds.default_of(field) for field in dataclasses.fields(kind)}
    found = []
    for name, one in kinds.field_types(kind).items():
        plain = {each for each in kinds.alternatives(one) if each in kinds.SCALARS}
        plain |= {each for each in kinds.alternatives(one) if kinds.is_enum(each)}
        plain |= {type(None)} if kinds.takes_none(one) else set()
        found.append(_Field(name, one, defaults[name], frozenset(plain)))
    return found


def check_argument(owner: str, name: str, value: Any, kind: Any) -> None:
    """Check one argument of a class that is no dataclass, likewise.

    Raises:
        ConfigError: see `check_fields`.
    """
    if _taken(kind, value) is _UNFIT:
        raise _wrong(owner, name, value, kind)


def shown(value: Any) -> str:
    """Return a wrong value as one short line for messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _wrong(owner: str, name: str, value: Any, kind: Any) -> ConfigError:
    wanted = kinds.wanted(kind, kinds.IN_PYTHON)
    return ConfigError(f"{owner} has {name}={shown(value)}; it must be {wanted}.")


def _taken(kind: Any, value: Any, default: Any = None) -> Any:
    """Return the value converted to the type, or `_UNFIT`."""
    if value is None and kinds.takes_none(kind):
        return None
    for one in kinds.alternatives(kind):
        taken = _taken_one(one, value, default)
        if taken is not _UNFIT:
            return taken
    return _UNFIT


def _taken_one(kind: Any, value: Any, default: Any) -> Any:
    if get_origin(kind) is Literal:
        return value if isinstance(value, str | int) and value in get_args(kind) else _UNFIT
    if kinds.is_enum(kind):
        return _member(kind, value)
    if kind in kinds.SCALARS:
        return _scalar(kind, value)
    items, pair = kinds.item_types(kind), kinds.mapping_types(kind)
    if items is not None:
        return _items(kind, items, value)
    if pair is not None:
        fits = isinstance(value, Mapping) and all(
            _taken(of, one) is not _UNFIT
            for each in value.items()
            for of, one in zip(pair, each, strict=True)
        )
        return value if fits else _UNFIT
    if get_origin(kind) is Callable:
        return value if callable(value) else _UNFIT
    made = kinds.of_word(kind, value, default)
    if made is not None:
        return made
    # Any, a protocol, and what only checkers can name say nothing that could be asked of a value.
    is_class = isinstance(kind, type) and kind not in (Any, kinds.Code)
    if not is_class or getattr(kind, "_is_protocol", False) or isinstance(value, kind):
        return value
    return _UNFIT


def _member(kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    names = (one for one in kind if isinstance(value, str) and value in (one.value, one.name))
    return next(names, _UNFIT)


def _scalar(kind: Any, value: Any) -> Any:
    if kind is bool or isinstance(value, bool):
        return value if kind is type(value) else _UNFIT
    if kind is int:
        return int(value) if isinstance(value, Integral) else _UNFIT
    if kind is float:
        if isinstance(value, float):
            return value
        try:
            # torch takes whole numbers of 64 bits alone
            is_short = isinstance(value, int) and abs(value) < 2**63
            return value if is_short else float(value) if isinstance(value, Real) else _UNFIT
        except OverflowError:
            return _UNFIT
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return text if isinstance(text, str) else _UNFIT


def _items(kind: Any, items: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        return _UNFIT
    given = list(value)
    of_each = [items[0]] * len(given) if items[-1] is ... else list(items)
    if len(of_each) != len(given):
        return _UNFIT
    taken = [_taken(of, one) for of, one in zip(of_each, given, strict=True)]
    if any(one is _UNFIT for one in taken):
        return _UNFIT
    origin = get_origin(kind) or kind
    if isinstance(value, origin) and all(a is b for a, b in zip(taken, given, strict=True)):
        return value
    return origin(taken) if origin in (list, tuple, set, frozenset) else tuple(taken)
