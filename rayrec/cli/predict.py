"""`rayrec predict`: the score of every row, by a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from rayrec import arguments
from rayrec.cli.base import PATH, Checked, Command
from rayrec.cli.scored import score, scoring_options


@click.command(
    cls=Command,
    examples="""
rayrec predict runs/clicks/step-00000020 --data data/clicks --out scores.parquet --local
rayrec predict runs/clicks/step-00000020 --data rows/ --out scores.parquet --keys user,item
""",
)
@scoring_options
@click.option(
    "--out",
    type=PATH,
    required=True,
    metavar="FILE",
    help="Parquet file for the scores of all rows",
)
@click.option(
    "--keys",
    type=Checked(arguments.names, "names"),
    default=(),
    metavar="COLUMN,...",
    help="columns of the data to copy into it",
)
def command(out: str, keys: tuple[str, ...], **given: Any) -> None:
    """Write one row per row of the data, in the order of the files.

    Columns: score (the predicted probability of label 1), label, file, row (its number in the file)
    and those of --keys.
    """
    score(given, out, keys)
