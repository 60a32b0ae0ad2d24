"""Sort an event log for histories: python -m jobs.convert_events SOURCE OUT --user U --time T.

`rayrec.data.event_log` says what is written, and how much memory it takes.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import click

from rayrec.cli.base import Command
from rayrec.cli.group import run_click
from rayrec.cli.values import PATH, count
from rayrec.command import run_command
from rayrec.data.event_log import EventSplit, WrittenLog, write_event_log


@click.command(
    cls=Command,
    examples="""
python -m jobs.convert_events plays.parquet data/plays --user user_id --time played_at
python -m jobs.convert_events plays/ data/plays --user uid --time timestamp --test-from 1700000000
""",
)
@click.argument("source", type=PATH, metavar="SOURCE")
@click.argument("out", type=PATH, metavar="OUT")
@click.option("--user", required=True, metavar="COLUMN", help="of whose event a row is")
@click.option(
    "--time", required=True, metavar="COLUMN", help="whole numbers, or timestamps, made seconds"
)
@click.option(
    "--test-from",
    type=int,
    metavar="TIME",
    help="events of this time and later are the test, instead of the last of every user",
)
@click.option(
    "--validation-from",
    type=int,
    metavar="TIME",
    help="with --test-from: the validation begins here",
)
@click.option(
    "--windows",
    type=count(),
    metavar="N",
    help="mark in column window_end where a window of N training events of a user ends",
)
@click.option("--overwrite", is_flag=True, help="replace what an earlier conversion left in OUT")
def command(**given: Any) -> None:
    """Write OUT/log (Parquet): the events of SOURCE sorted by user and time, and split.

    SOURCE is a folder or a file of Parquet or Arrow. Of equal times the event that stands earlier
    in SOURCE is the earlier one.
    """
    names = ("test_from", "validation_from", "windows")
    split = EventSplit(**{name: given.pop(name) for name in names})
    say(write_event_log(split=split, **given))


def say(log: WrittenLog) -> None:
    """Print what a conversion made."""
    parts = ", ".join(f"{count} for {part}" for part, count in log.events.items())
    print(f"{sum(log.events.values())} events of {log.users} users in {log.path}: {parts}")


main = partial(run_click, command, "python -m jobs.convert_events")


if __name__ == "__main__":
    sys.exit(run_command(main))
