"""`rayrec report`: runs as one HTML page."""

from __future__ import annotations

import click

from rayrec.cli.base import Command, file_option
from rayrec.cli.values import PATH


@click.command(
    cls=Command,
    needs="rayrec.driver.replay",
    examples="""
rayrec report runs/clicks --out clicks.html
rayrec report runs/a runs/b s3://bucket/runs/c --out compared.html
""",
)
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUN...")
@file_option("--out", default="report.html", show_default=True, help="where to write the page")
def command(runs: tuple[str, ...], out: str) -> None:
    """Show runs on one self-contained HTML page: curves, plans, times, memory and events.

    RUN is the folder of a run, as [run] storage_path and name say, or its events.jsonl. The run may
    still train, or have been killed. Runs that ranked the same held-out rows are compared query by
    query with the first of them. Where the driver kept its decisions ([run] failure
    log_decisions), they are decided again, and the states of the run are printed with their times.
    """
    from rayrec.driver.replay import timelines
    from rayrec.runs.ranked_queries import comparison
    from rayrec.watch import write_run_page

    print(f"page: {write_run_page(runs, out)}")
    for line in comparison(runs):
        print(line)
    for run in runs:
        for line in timelines(run):
            print(line)
