"""What is said of data that is no record, with its place, in a run file and in JSON."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from rayrec.errors import ConfigError
from rayrec.fields import kinds
from rayrec.fields.typed import shown


class Misfit(ValueError):
    """A value that does not fit its type, or a table that its class does not take.

    Args:
        says: the words that follow the place.
        about: the value at the place, the keys of the table there, or that its class refuses it.
        key: the key of the table that the words are about, or None.
    Attributes:
        path: keys and indices down to the place, the last one first: it grows as the error rises.
    """

    def __init__(
        self, says: str, about: Literal["value", "keys", "refusal"], key: str | None = None
    ) -> None:
        super().__init__(says)
        self.says, self.about, self.key = says, about, key
        self.path: list[str | int] = []

    def at(self, name: str | int) -> Misfit:
        """The same error, seen from one level above."""
        self.path.append(name)
        return self

    def __str__(self) -> str:
        """The place as a path, `tables[3].columns`, and the words."""
        steps = (f"[{one}]" if isinstance(one, int) else f".{one}" for one in reversed(self.path))
        place = "".join(steps).removeprefix(".")
        joint = ": " if self.about == "refusal" else " "
        return f"{place}{joint}{self.says}" if place else self.says

    def in_file(self, source: str) -> str:
        """The line about a file of JSON."""
        of_file = not self.path and self.about != "refusal"
        return f"{source} {self}" if of_file else f"{source}: {self}"

    def in_run_file(self, source_of: Callable[[tuple[str, ...]], str]) -> ConfigError:
        """The error as a run file has it, with the table in brackets.

        Args:
            source_of: who said what stands at a path.
        """
        path = tuple(
            f"item {one + 1}" if isinstance(one, int) else one for one in reversed(self.path)
        )
        table, last = (path[:-1], f"{path[-1]} ") if self.about == "value" else (path, "")
        where = f"[{'.'.join(table)}] " if table else ""
        source = source_of(path if self.key is None else (*path, self.key))
        return ConfigError(f"{source}: {where}{last}{self.says}")


class Notation(NamedTuple):
    """What a run file and a JSON file say differently.

    Attributes:
        words: of the types, in errors.
        unknown, missing: formats of what is said of a key.
        lends: whether a table keeps what it does not say from the default of its field, and may be
            of a subclass of the dataclass that is annotated.
    """

    words: kinds.Words
    unknown: str
    missing: str
    lends: bool

    def wrong(self, value: Any, kind: Any) -> Misfit:
        """The error of a value that is not of a type."""
        return wrong(value, kinds.wanted(kind, self.words))

    def unknown_key(self, key: str, known: Collection[str]) -> Misfit:
        """The error of a key that its table does not take."""
        return Misfit(self.unknown.format(key) + meant(key, known), "keys", key)

    def missing_key(self, key: str, kind: Any) -> Misfit:
        """The error of a table that lacks a key."""
        return Misfit(self.missing.format(key, kinds.wanted(kind, self.words)), "keys")


def wrong(value: Any, want: str) -> Misfit:
    """The error of a value instead of which something else is wanted."""
    told = str(value).lower() if isinstance(value, bool) else shown(value)
    return Misfit(f"is {told}; it must be {want}.", "value")


TOML = Notation(kinds.IN_RUN_FILE, "has {}", "needs {}: {}.", lends=True)
JSON = Notation(
    kinds.IN_JSON, "has the unknown field {!r}", "has no field {!r}; give it {}.", lends=False
)


def meant(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the nearest one that exists, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(known)}." if known else "; there are none here."
