"""`rayrec smoke`: a check of thirty seconds that says whether a cluster is fit to train."""

from __future__ import annotations

from typing import Any

import click

from rayrec.cli.base import RANK_OPTIONS, Command, with_options


@click.command(
    cls=Command,
    needs="rayrec.driver.smoke_check",
    examples="""
rayrec smoke --ranks 2
rayrec smoke --ranks 8 --gpu --cpus-per-rank 8 --placement-timeout 900
""",
)
@with_options(RANK_OPTIONS)
def command(**given: Any) -> None:
    """Check that a cluster is fit to train; says OK, or names the fault.

    Ray answers, the ranks find room and start, they form a process group, one all_to_all brings
    every number where it belongs, and one sharded training step runs on every rank with a table cut
    over all of them.
    """
    from rayrec.driver.smoke_check import check_cluster
    from rayrec.runs.scaling import scaling_from

    check_cluster(scaling_from(local=False, **given), lambda line: print(line, flush=True))
