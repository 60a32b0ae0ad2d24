"""The readers of lists and of mappings, from those of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, get_origin

from rayrec.fields.misfit import Misfit, Notation
from rayrec.fields.scalars import MAX_INTEGER, Read


def reader_of_items(
    kind: Any, items: tuple[Any, ...], reads: list[Read], whole: Any, notation: Notation
) -> Read:
    """The function that reads a list, given those of its items.

    Args:
        items: their types, and an ellipsis where there may be any number of one type.
        whole: the union that the type is a member of, for errors.
    """
    make, count = _maker(kind, notation), None if items[-1] is ... else len(items)
    of_each = [one for one in items if one is not ...]
    are_integers = set(of_each) == {int}
    ways = repeat(reads[0]) if count is None else reads

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
            for way, value in zip(ways, values, strict=False):
                made.append(way(value, None))
        except Misfit as error:
            raise error.at(len(made)) from error.__cause__
        return make(made)

    return read


def reader_of_mapping(kind: Any, one: Read, whole: Any, notation: Notation) -> Read:
    """The function that reads a mapping, given the type of its values and the reader of one."""

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


def _maker(kind: Any, notation: Notation) -> Callable[[list[Any]], Any]:
    """What makes a collection of a list of its items."""
    origin: Any = get_origin(kind) or kind
    if origin is range:
        return lambda ends: range(*ends)
    if hasattr(origin, "_make"):
        made: Callable[[list[Any]], Any] = origin._make
        return made
    if origin in (list, set, frozenset):
        collection: Callable[[list[Any]], Any] = origin
        return collection
    # JSON gives what is any sequence as a list
    return tuple if notation.lends or issubclass(origin, tuple) else list
