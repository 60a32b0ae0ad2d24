"""`rayrec forget`: the rows of some keys taken out of every file of a run."""

from __future__ import annotations

import click

from rayrec.cli.base import Command, file_option
from rayrec.cli.values import PATH


@click.command(
    cls=Command,
    needs="rayrec.erasure.forget",
    examples="""
rayrec forget --keys users.csv runs/clicks
rayrec forget --keys users.parquet --signing-key env:SERVING_KEY served
""",
)
@click.argument("run", type=PATH, metavar="RUN")
@file_option(
    "--keys",
    required=True,
    help="CSV, Parquet or Arrow file of the keys; a column is named like a feature, a column of "
    "the data or a table",
)
@click.option(
    "--signing-key",
    metavar="FILE|env:NAME",
    help="key by which artifacts and publications are signed",
)
def command(run: str, keys: str, signing_key: str | None) -> None:
    """Take the rows of some keys out of every checkpoint, artifact and publication of a run.

    RUN is the folder of a run that does not train now, or one that holds artifacts or publications.
    Weights, state of optimizers and counters of the keys are gone from all of them, and a receipt
    says from which. docs/forget.md says what that does not undo.
    """
    from rayrec.erasure.forget import forget

    receipt, path = forget(run, keys, signing_key=signing_key)
    print(receipt.to_text())
    print(f"receipt: {path}")
