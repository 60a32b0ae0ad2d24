"""The readers of single values: words, numbers and texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rayrec.fields import kinds
from rayrec.fields.misfit import Notation, wrong

MAX_INTEGER = 2**63 - 1
# the data and the value without them -> what the field holds
Read = Callable[[Any, Any], Any]


def reader_of_scalar(kind: Any, whole: Any, notation: Notation) -> Read:
    """The function that reads a type which holds no others.

    Args:
        whole: the union that it is a member of, for errors.
    """
    if kind is int:
        return _reader_of_integers(whole, notation)
    if kind is float:
        return _reader_of_numbers(whole, notation)
    fits = form_of(kind)
    make: Callable[[Any], Any] | None = {Path: Path}.get(kind)
    if kinds.is_enum(kind):
        make = partial(_member, kind)

    def read(value: Any, base: Any) -> Any:
        if not fits(value):
            raise notation.wrong(value, whole)
        return value if make is None else make(value)

    return read


def _reader_of_integers(whole: Any, notation: Notation) -> Read:
    def read(value: Any, base: Any) -> Any:
        # true is an int to `isinstance`
        if type(value) is not int:
            raise notation.wrong(value, whole)
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise wrong(value, "a whole number of 64 bits")
        return value

    return read


def _reader_of_numbers(whole: Any, notation: Notation) -> Read:
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


def is_table(value: Any) -> bool:
    """Return True if data are a table of a run file, or an object of JSON."""
    return isinstance(value, Mapping)


def form_of(kind: Any) -> Callable[[Any], bool]:
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
    return is_table


def _member(kind: Any, value: Any) -> Any:
    """The member of an enum that a word means, by its value or, in any case, by its name."""
    if not isinstance(value, str):
        return None
    known = (one for one in kind if value == one.value or value.upper() == one.name.upper())
    return next(known, None)
