"""Typed reading of JSON objects: every wrong field is an error that names file, place and field.

`parse_object` turns text into `Fields`; each read takes one field and checks its type (true is no
integer, 1.0 is no integer); `finish` refuses fields that nobody read, so a misspelt name never
passes silently. Doubled keys and NaN are refused, which plain `json.loads` lets through. Standard
library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rayrec.errors import PlanError

MAX_INTEGER = 2**63 - 1
T = TypeVar("T")
JSON_NAMES: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean"}
JSON_NAMES |= {int: "integer", float: "number", type(None): "null"}


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise PlanError(f"the key {key!r} occurs twice in one object.")
        out[key] = value
    return out


def _no_constant(name: str) -> float:
    raise PlanError(f"{name} is no number of JSON.")


def parse_object(text: str, source: str) -> Fields:
    """Parse text that must hold one JSON object.

    Raises:
        PlanError: names `source`: it is not JSON, not an object, has a doubled key or NaN.
    """
    try:
        data = json.loads(text, object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is not valid JSON: {error or 'nested too deeply'}.") from None
    if not isinstance(data, dict):
        raise PlanError(f"{source} holds a JSON {_name(data)}, expected an object.")
    return Fields(data, source)


def _name(value: object) -> str:
    return JSON_NAMES.get(type(value), type(value).__name__)


@dataclass
class Fields:
    """One JSON object being read; `where` is the file and the place inside it."""

    data: dict[str, Any]
    where: str
    _seen: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        # A null means the same as a missing field, so it counts as read.
        if name in self.data and self.data[name] is None:
            self._seen.add(name)
        return self.data.get(name) is not None

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """What one of the reading methods takes from the field; None where it is not there."""
        return read(name) if self.has(name) else None

    def skip(self, name: str) -> None:
        """Allow a field that is written for people and not read."""
        self._seen.add(name)

    def finish(self) -> None:
        """Refuse fields that were not read."""
        if extra := [name for name in self.data if name not in self._seen]:
            raise PlanError(
                f"{self.where}: unknown field {extra[0]!r}; known are "
                f"{', '.join(sorted(self._seen))}."
            )

    def keys(self) -> list[str]:
        """Names of all fields, in file order."""
        return list(self.data)

    def _take(self, name: str, types: tuple[type, ...], wanted: str) -> Any:
        if name not in self.data:
            raise PlanError(f"{self.where}: field {name!r} is missing; expected {wanted}.")
        self._seen.add(name)
        # `isinstance` would take true for an integer, since bool is a subclass of int.
        if type(self.data[name]) not in types:
            raise self.wrong(name, wanted, self.data[name])
        return self.data[name]

    def wrong(self, name: str, wanted: str, value: object) -> PlanError:
        """The error for a field of another type."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return PlanError(
            f"{self.where}: field {name!r} is {_name(value)} {shown}, expected {wanted}."
        )

    def text(self, name: str) -> str:
        """A string."""
        return self._take(name, (str,), "a string")

    def integer(self, name: str) -> int:
        """An integer of 64 bits; booleans and floats are refused."""
        value = self._take(name, (int,), "an integer")
        if abs(value) > MAX_INTEGER:
            raise self.wrong(name, "an integer of 64 bits", value)
        return value

    def number(self, name: str) -> float:
        """An integer or float, finite."""
        value = self._take(name, (int, float), "a number")
        if not abs(value) <= sys.float_info.max:  # 1e999 reads as infinity
            raise self.wrong(name, "a finite number", value)
        return float(value)

    def boolean(self, name: str) -> bool:
        """true or false."""
        return bool(self._take(name, (bool,), "true or false"))

    def texts(self, name: str) -> list[str]:
        """An array of strings."""
        values = self.array(name)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, "an array of strings", values)
        return values

    def array(self, name: str) -> list[Any]:
        """An array of anything."""
        return self._take(name, (list,), "an array")

    def ints(self, name: str) -> tuple[int, ...]:
        """An array of integers."""
        return self._ints(name, self.array(name))

    def int_rows(self, name: str) -> tuple[tuple[int, ...], ...]:
        """An array of arrays of integers."""
        return tuple(self._ints(name, row) for row in self.array(name))

    def _ints(self, name: str, values: Any) -> tuple[int, ...]:
        is_list = isinstance(values, list)
        if is_list and all(type(v) is int and abs(v) <= MAX_INTEGER for v in values):
            return tuple(values)
        raise self.wrong(name, "integers only, of 64 bits", values)

    def child(self, name: str) -> Fields:
        """A nested object."""
        return Fields(self._take(name, (dict,), "an object"), f"{self.where}: {name}")

    def children(self, name: str) -> list[Fields]:
        """An array of objects."""
        entries = []
        for i, item in enumerate(self.array(name)):
            if not isinstance(item, dict):
                raise self.wrong(f"{name}[{i}]", "an object", item)
            entries.append(Fields(item, f"{self.where}: {name}[{i}]"))
        return entries
