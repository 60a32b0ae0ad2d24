"""`rayrec evaluate`: the scores of a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from rayrec.cli.base import Command
from rayrec.cli.scored import score, scoring_options


@click.command(
    cls=Command,
    needs="rayrec.checkpoint",
    examples="""
rayrec evaluate runs/clicks@best --data data/clicks --local
rayrec evaluate s3://bucket/run/step-00001000 --data s3://bucket/eval --ranks 4 --plan row_wise
""",
)
@scoring_options()
def command(**given: Any) -> None:
    """Score a checkpoint on any number of ranks and under any plan.

    The checkpoint says how to build its model; --schema is needed only when columns have other
    names in the data to score.
    """
    score(given)
