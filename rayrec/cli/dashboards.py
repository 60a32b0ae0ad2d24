"""`rayrec dashboards`: boards and alerts for the metrics of runs."""

from __future__ import annotations

import click

from rayrec.cli.base import PATH, Command


@click.command(
    cls=Command,
    examples="""
rayrec dashboards watching
rayrec dashboards ~/grafana/rayrec
""",
)
@click.argument("out", type=PATH, metavar="DIR")
def command(out: str) -> None:
    """Write a Grafana board, Prometheus alerts and a configuration of Prometheus into a folder."""
    from rayrec.watch import write_dashboards

    for path in write_dashboards(out):
        print(f"written: {path}")
