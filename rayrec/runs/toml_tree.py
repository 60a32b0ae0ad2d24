"""A TOML file and the `--set KEY=VALUE` beside it, as one tree of tables with the sources.

A value of `--set` is read as TOML; what is no TOML, such as a bare word or a path, is a text.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayrec.errors import ConfigError

# Keys that say one thing in several ways; a change of one takes the place of the file's others.
INSTEAD: dict[tuple[str, ...], tuple[str, ...]] = {
    ("run", "steps"): ("epochs",),
    ("run", "epochs"): ("steps",),
    ("data", "train"): ("planted",),
    ("data", "eval"): ("planted",),
    ("data", "schema"): ("planted",),
    ("data", "planted"): ("train", "eval", "schema"),
}


class Option(NamedTuple):
    """An option of the command line, `said` in messages, that stands for a key of a run file."""

    said: str
    path: tuple[str, ...]
    value: Any


class Settings(NamedTuple):
    """Tables of a file, changed by options and `--set`.

    Attributes:
        tables: all of them, by the names of the sections.
        file: the file, or None.
        changes: path of a key -> the `--set` that said it.
        sections: names of the sections that the file has.
    """

    tables: dict[str, Any]
    file: str | None
    changes: dict[tuple[str, ...], str]
    sections: frozenset[str]

    def source_of(self, path: tuple[str, ...]) -> str:
        """Return the source of the value at a path: the file, a `--set`, or both."""
        for changed, said in self.changes.items():
            if path[: len(changed)] == changed:
                return said
        below = [said for changed, said in self.changes.items() if changed[: len(path)] == path]
        if self.file is not None and (path[0] in self.sections or not below):
            below.insert(0, self.file)
        # an option that says several keys is named once
        return " with ".join(dict.fromkeys(below)) or "the command line"


def read_settings(
    file: str | None, changes: Sequence[str], options: Sequence[Option] = ()
) -> Settings:
    """Read a TOML file, and put the options and then the changes into it.

    Raises:
        ConfigError: the file cannot be read or is no TOML, with the line; a change has no key, or
            a quote without its second; an option and a change say the same key, or a change takes
            the place of another.
    """
    tables = {} if file is None else _read_toml(file)
    settings = Settings(tables, file, {}, frozenset(tables))
    for option in options:
        _put(settings, option.path, option.value, option.said)
    for change in changes:
        key, sign, text = change.partition("=")
        path = _key(key, change) if sign else ()
        if len(path) < 2:
            raise ConfigError(f"--set {change} must be SECTION.KEY=VALUE, such as run.steps=500.")
        _put(settings, path, _value(text.strip(), change), f"--set {change}")
    return settings


def _read_toml(file: str) -> dict[str, Any]:
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the run file {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the run file {file} as text: {error}.") from None
    except ValueError as error:  # of TOML, or of a number of thousands of digits
        place = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        what = re.sub(r" \(at [^()]*\)$", "", str(error))
        raise ConfigError(f"{file}, line {line} is no TOML: {what}.") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply.") from None


def _key(text: str, change: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, which may be quoted as in TOML."""
    try:
        table: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        table = {}
    path = []
    while isinstance(table, dict):
        # a comment has none
        if not table:
            raise ConfigError(f"--set {change}: {text!r} is no key of TOML.")
        ((name, table),) = table.items()
        path.append(name)
    return tuple(path)


def _value(text: str, change: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        # A condition such as day == '2026-11-01' ends with a quote that another one opens.
        for quote in set(text[:1] + text[-1:]) & {"'", '"'}:
            if text.count(quote) % 2:
                raise ConfigError(
                    f"--set {change} has {quote} without a second one; close it, or leave it out."
                ) from None
        return text
    # No field takes a date, and a line break in the text could begin another key.
    if list(parsed) != ["value"] or isinstance(parsed["value"], datetime.date | datetime.time):
        return text
    return parsed["value"]


def _put(settings: Settings, path: tuple[str, ...], value: Any, said: str) -> None:
    for changed, before in settings.changes.items():
        if changed != path and changed[: len(path)] == path:
            raise ConfigError(f"{said} takes the place of {before}; leave one of them out.")
        if changed == path and not before.startswith("--set"):
            raise ConfigError(f"{before} and {said} say the same key; leave one of them out.")
    table = settings.tables
    for depth, name in enumerate(path[:-1], start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            held = ".".join(path[:depth])
            raise ConfigError(f"{said}: {held} is {table!r} and no table, so it has no keys.")
    table[path[-1]] = value
    settings.changes[path] = said
    said_before = {changed[:2] for changed in settings.changes}
    for other in INSTEAD.get(path[:2], ()) if value != "none" else ():
        if (path[0], other) not in said_before:
            settings.tables[path[0]].pop(other, None)
