"""The parts that jobs.convert_criteo and jobs.convert_movielens share: options, checks, result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from rayrec.cli.base import F, default_option, with_options
from rayrec.cli.values import FRACTION, SEED, count
from rayrec.data.converted import PARTS


class Converted(NamedTuple):
    """The data that a conversion wrote, the schema that they fit, and their rows."""

    train: Path
    eval: Path
    schema: Path
    rows_train: int
    rows_eval: int


def converted(out: str | Path, rows_train: int, rows_eval: int) -> Converted:
    """The parts of the folder `out` after a conversion."""
    train, evaluation, schema = (Path(out) / name for name in PARTS[:3])
    return Converted(train, evaluation, schema, rows_train, rows_eval)


def options(held_out: str, drawn: str) -> Callable[[F], F]:
    """Return a decorator that adds the options that both jobs have.

    Args:
        held_out: the rows that are held out, as the help calls them.
        drawn: how their share is meant.
    """
    found = [
        default_option("--dim", type=count(), default=16, help="width of every table"),
        click.option(
            "--dynamic",
            type=count(),
            metavar="ROWS",
            help="write ids as they are, for dynamic tables of so many rows each",
        ),
        default_option("--seed", type=SEED, default=0, help=f"which {held_out} are held out"),
        default_option("--eval-fraction", type=FRACTION, default=0.1, help=f"share of {drawn}"),
        click.option(
            "--overwrite", is_flag=True, help="replace what an earlier conversion left in OUT"
        ),
    ]
    return with_options(found)


def say(done: Converted, rows: str) -> None:
    """Print what a conversion made; `rows` is the word for it."""
    print(
        f"{done.rows_train} {rows} in {done.train}, {done.rows_eval} in {done.eval}, schema "
        f"{done.schema}"
    )
