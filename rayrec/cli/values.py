"""Types of the values that options take: click's own, finite numbers, and words of rayrec.

A value that does not fit is a `click.BadParameter`, which names the option. The bounds are those of
`rayrec.checks`, which the configs hold as well. Imports click and the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from rayrec.checks import MAX_SECONDS, MAX_SEED, check_once
from rayrec.errors import ConfigError


class Count(click.IntRange):
    """Type of a whole number in a range, which the help shows behind the text of the option."""

    name = click.INT.name


class Number(click.FloatRange):
    """Type of a finite number in a range."""

    name = click.FLOAT.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


class Parsed(click.ParamType):
    """Type of a text that a function turns into a value.

    Args:
        parse: text -> value; raises `ConfigError`.
        name: name of the type in the help.
    """

    def __init__(self, parse: Callable[[str], Any], name: str) -> None:
        self._parse, self.name = parse, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; defaults are values already and pass unchanged."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class PathType(click.ParamType):
    """Type of a path or URI; a shell completes it as a file."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; an empty one is often that of a variable which is not set."""
        if not value.strip():
            is_option = isinstance(param, click.Option) and not param.required
            instead = "; leave the option out for none" if is_option else ""
            self.fail(f"{value!r} is no path{instead}.", param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return a wish for files."""
        return [CompletionItem(incomplete, type="file")]


def count(least: int = 1, most: int | None = None) -> Count:
    """Return the type of a whole number in [least, most]."""
    return Count(least, most)


def duration(text: str) -> float:
    """Return the seconds of a duration such as "20s", "500ms", "2m" or "20"."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.strip().rstrip("mhs")
    try:
        value = float(number) * units[text.strip()[len(number) :] or "s"]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value <= MAX_SECONDS:
        raise ConfigError(
            f"{text!r} must be a duration above 0 and at most {MAX_SECONDS:.0f}s, such as 20s, "
            "500ms or 2m."
        )
    return value


def names(text: str) -> tuple[str, ...]:
    """Return the names of a list such as "user,age"."""
    given = tuple(name.strip() for name in text.split(","))
    if not all(given):
        raise ConfigError(f"{text!r} must be names with commas between them, such as user,age.")
    return check_once(given)


def ranks(text: str) -> int | tuple[int, int]:
    """Return a number of ranks, such as 4, or the least and the most that there may be: 2:4."""
    try:
        numbers = [int(number) for number in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or numbers[0] < 1 or sorted(numbers) != numbers:
        raise ConfigError(
            f"{text!r} must be a whole number of at least 1, or LEAST:MOST such as 2:4."
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def named_choice(choices: Sequence[str]) -> Parsed:
    """Return the type of NAME=CHOICE, with one of some words behind the last "="."""

    def parse(text: str) -> tuple[str, str]:
        name, _, choice = text.rpartition("=")
        if not name or choice not in choices:
            raise ConfigError(f"{text!r} must be NAME=TYPE with a type of {', '.join(choices)}.")
        return name, choice

    return Parsed(parse, "NAME=TYPE")


PATH = PathType()
SEED = Count(0, MAX_SEED)
POSITIVE = Number(0, min_open=True)
FRACTION = Number(0, 1, max_open=True)
SHARE = Number(0, 1)
SECONDS = Number(0, MAX_SECONDS, min_open=True)
DURATION = Parsed(duration, "duration")
NAMES = Parsed(names, "names")
RANKS = Parsed(ranks, "ranks")
