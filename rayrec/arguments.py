"""Types of command-line options: text to a checked value, or what the option takes instead.

argparse puts the option's name before what these functions say, so a wrong number is found while
the command line is read and the message names the option as the user wrote it. The bounds are those
of `checks`, which the configs hold as well. Needs the standard library only.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence

from rayrec.checks import MAX_SECONDS, MAX_SEED


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return a type that takes whole numbers from `least` to `most`, or without an upper bound.

    Raises:
        argparse.ArgumentTypeError: raised by the type: the text is no such number.
    """
    bound = f"of at least {least}" if most is None else f"between {least} and {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"{text!r} must be a whole number {bound}")
        return value

    return parse


def ranks(text: str) -> int | tuple[int, int]:
    """Take a number of ranks, such as 4, or the least and the most that there may be: 2:4.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    if ":" not in text:
        return whole()(text)
    least, _, most = text.partition(":")
    try:
        both = int(least), int(most)
    except ValueError:
        both = 0, 0
    if not 1 <= both[0] <= both[1]:
        raise ArgumentTypeError(
            f"{text!r} must be a whole number of at least 1, or LEAST:MOST such as 2:4"
        )
    return both


def seed(text: str) -> int:
    """Take a seed.

    Raises:
        argparse.ArgumentTypeError: it is no whole number from 0 to 2**63 - 1.
    """
    return whole(0, MAX_SEED)(text)


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a type that takes finite numbers with a property.

    Args:
        what: the property in words that complete "must be a number ...".
        fits: returns True if a finite number has the property.
    Raises:
        argparse.ArgumentTypeError: raised by the type: the text is no such number.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not fits(value):
            raise ArgumentTypeError(f"{text!r} must be a number {what}")
        return value

    return parse


positive = number("above 0, and finite", lambda value: value > 0)
rate = number("of at least 0, and finite", lambda value: value >= 0)
fraction = number("from 0 to below 1", lambda value: 0 <= value < 1)
share = number("from 0 to 1", lambda value: 0 <= value <= 1)
seconds = number(
    f"of seconds above 0 and at most {MAX_SECONDS:.0f}", lambda value: 0 < value <= MAX_SECONDS
)


def duration(text: str) -> float:
    """Parse a duration such as "20s", "500ms", "2m" or "20", in seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above 0, or too long.
    """
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.strip().rstrip("mhs")
    try:
        value = float(number) * units[text.strip()[len(number) :] or "s"]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value <= MAX_SECONDS:
        raise ArgumentTypeError(
            f"{text!r} must be a duration above 0 and at most {MAX_SECONDS:.0f}s, such as 20s, "
            "500ms or 2m"
        )
    return value


def path(text: str) -> str:
    """Take a path or a URI.

    Raises:
        argparse.ArgumentTypeError: it is empty, as that of a variable which is not set.
    """
    if not text.strip():
        raise ArgumentTypeError(f"{text!r} must be a path; leave the option out for none")
    return text


def names(text: str) -> tuple[str, ...]:
    """Parse names such as "user,age".

    Raises:
        argparse.ArgumentTypeError: a name is empty, or given twice.
    """
    given = tuple(name.strip() for name in text.split(","))
    if not all(given):
        raise ArgumentTypeError(
            f"{text!r} must be names with commas between them, such as user,age"
        )
    check_once(given)
    return given


def named_choice(choices: Sequence[str]) -> Callable[[str], tuple[str, str]]:
    """Return a type that takes NAME=CHOICE, with one of some words behind the last "=".

    Raises:
        argparse.ArgumentTypeError: raised by the type: the text is of another form.
    """

    def parse(text: str) -> tuple[str, str]:
        name, _, choice = text.rpartition("=")
        if not name or choice not in choices:
            raise ArgumentTypeError(
                f"{text!r} must be NAME=TYPE with a type of {', '.join(choices)}"
            )
        return name, choice

    return parse


def check_once(values: Sequence[object]) -> None:
    """Check that no value stands in a list twice.

    Raises:
        argparse.ArgumentTypeError: names the one that does.
    """
    twice = [one for one in values if values.count(one) > 1]
    if twice:
        raise ArgumentTypeError(f"{twice[0]!r} is given twice; give it once")
