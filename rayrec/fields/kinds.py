"""Types of a dataclass's fields, and the values that a run file and a program may give each.

A field is read by its annotation alone, so a config that gains a field needs nothing here. A table
of a run file becomes a dataclass: the annotated one, or a subclass of it. What is neither plain
data nor such a dataclass is code, such as a function or an object of the user's, and stays with the
Python API.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

NONE = "none"  # the word for None in a run file, since TOML has none
TYPE = "type"  # the key that says which of several dataclasses a table means
STATED = {"stated": True}  # metadata of a field that JSON must say, although it has a default
SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
SCALARS |= {Path: "a path"}


class Words(NamedTuple):
    """How errors call what a field takes: in a program, in a run file or in JSON."""

    none: str
    flag: str
    table: str


IN_PYTHON = Words("None", "True or False", "")
IN_RUN_FILE = Words(f'"{NONE}"', SCALARS[bool], "a table")
IN_JSON = Words("null", SCALARS[bool], "an object")


class Code:
    """Stands for the type of a field that cannot be resolved: its names exist for checkers only."""


def field_types(kind: type) -> dict[str, Any]:
    """Return the type of each field that the constructor of a dataclass takes."""
    resolved = {}
    for field in dataclasses.fields(kind):
        if field.init:
            owner = next(
                c for c in kind.__mro__ if field.name in vars(c).get("__annotations__", ())
            )
            resolved[field.name] = _resolve(field.type, owner)
    return resolved


def _resolve(annotation: Any, owner: type) -> Any:
    # A name is looked up in the module of the class that has the field, which may be a base.
    holder = types.SimpleNamespace(__annotations__={"field": annotation})
    try:
        return get_type_hints(holder, vars(sys.modules[owner.__module__]))["field"]
    except NameError:
        return Code


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default value of a field; `dataclasses.MISSING` where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def alternatives(kind: Any) -> list[Any]:
    """Return the members of a union without None, or the type itself if it is no union."""
    if get_origin(kind) in (Union, types.UnionType):
        return [one for one in get_args(kind) if one is not types.NoneType]
    return [kind]


def takes_none(kind: Any) -> bool:
    """Return True if a field of this type may be None."""
    return types.NoneType in get_args(kind)


def variants(kind: Any) -> list[type]:
    """Return the dataclasses that a table may become: those of a type or union, and subclasses.

    A base that is no dataclass itself has none: what its subclasses are is up to whoever imports.
    """
    bases = [one for one in alternatives(kind) if isinstance(one, type)]
    return [v for base in bases if dataclasses.is_dataclass(base) for v in _concrete(base)]


def _concrete(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    below = [variant for child in children for variant in _concrete(child)]
    # A dataclass with slots is made twice; the first of the two is in no module.
    module = sys.modules.get(kind.__module__)
    lost = getattr(module, kind.__name__, kind) is not kind
    usable = dataclasses.is_dataclass(kind) and not inspect.isabstract(kind) and not lost
    return [kind, *below] if usable else below


def item_types(kind: Any) -> tuple[Any, ...] | None:
    """Return the types of the items of a list of any length (one, and an ellipsis) or a fixed one.

    Returns:
        None where the type is no list.
    """
    origin, args = get_origin(kind) or kind, get_args(kind)
    if not isinstance(origin, type) or issubclass(origin, str | bytes):
        return None
    if issubclass(origin, tuple) and hasattr(origin, "_fields"):
        return tuple(get_type_hints(origin).values())
    if issubclass(origin, tuple) and args:
        return args
    if issubclass(origin, Sequence | set | frozenset):
        return (*(args or (Any,)), ...)
    return None


def mapping_types(kind: Any) -> tuple[Any, Any] | None:
    """Return the types of the keys and values of a mapping; None if the type is no mapping."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type) or not issubclass(origin, Mapping):
        return None
    return get_args(kind) or (str, Any)


def pairs_type(pair: tuple[Any, Any]) -> Any:
    """Return the type of the list that stands for a mapping; None where its keys are texts."""
    if pair[0] in (str, Any) or get_origin(pair[0]) is Literal:
        return None
    return types.GenericAlias(tuple, (types.GenericAlias(tuple, pair), ...))


def is_enum(kind: Any) -> bool:
    """Return True if the type is an enum."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def is_code(kind: Any) -> bool:
    """Return True if no value of this type can be written in a run file."""
    return all(_is_code(one) for one in alternatives(kind))


def _is_code(kind: Any) -> bool:
    if kind is Any or kind in SCALARS or get_origin(kind) is Literal or is_enum(kind):
        return False
    items, pair = item_types(kind), mapping_types(kind)
    if items is not None:
        return any(is_code(item) for item in items if item is not ...)
    if pair is not None:
        return is_code(pair[1])
    return not variants(kind)


def of_word(kind: Any, word: Any, base: Any) -> Any:
    """Return the value that a class makes of a word and a base value; None if it takes no word."""
    takes = isinstance(kind, type) and hasattr(kind, "of_word") and isinstance(base, kind)
    return kind.of_word(word, base) if takes and isinstance(word, str) else None


def wanted(kind: Any, words: Words) -> str:
    """Return the values that a type allows, in words that complete "it must be ..."."""
    in_python = words is IN_PYTHON
    kinds = [one for one in alternatives(kind) if in_python or not _is_code(one)]
    found = dict.fromkeys(_wanted(one, words) for one in kinds)
    return " or ".join([*found, words.none] if takes_none(kind) else found)


def _wanted(kind: Any, words: Words) -> str:
    if kind in SCALARS:
        return words.flag if kind is bool else SCALARS[kind]
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if is_enum(kind):
        # as JSON is written
        names = (one.name.lower() if words is IN_JSON else one.value for one in kind)
        return f"one of {', '.join(map(repr, names))}"
    items, pair = item_types(kind), mapping_types(kind)
    if items is not None and items[-1] is ...:
        return "a list" if items[0] is Any else f"a list, each item {wanted(items[0], words)}"
    if items is not None:
        return f"a list of {len(items)}: {', '.join(wanted(one, words) for one in items)}"
    if kind is Any:
        return "anything"
    if words.table:
        return words.table
    if pair is not None:
        return "a mapping" if pair[1] is Any else f"a mapping, each value {wanted(pair[1], words)}"
    return "a function" if get_origin(kind) is Callable else _call(kind)


def _call(kind: type) -> str:
    """Return an example call of a class, with its fields that have no default."""
    if not dataclasses.is_dataclass(kind) or inspect.isabstract(kind):
        return f"an instance of {kind.__name__}"
    lacking = [f for f in dataclasses.fields(kind) if default_of(f) is dataclasses.MISSING]
    return f"{kind.__name__}({', '.join([f'{f.name}=...' for f in lacking] or ['...'])})"
