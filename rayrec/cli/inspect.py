"""`rayrec inspect`: the content of data, with a schema that fits, of a run or of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rayrec.cli.base import Command, default_option, file_option, is_said
from rayrec.cli.values import NAMES, PATH, count

if TYPE_CHECKING:
    from rayrec.checkpoint import CheckpointReport
    from rayrec.watch.described import RunReport

SAMPLE = 100_000


@click.command(
    cls=Command,
    needs="rayrec.checkpoint",
    examples="""
rayrec inspect logs/ --schema schema.json
rayrec inspect logs/ --label clicked --where "day >= '2026-11-01'"
rayrec inspect runs/clicks
rayrec inspect runs/clicks@best
""",
)
@click.argument("path", type=PATH, metavar="DATA|RUN|CHECKPOINT")
@click.option(
    "--label",
    type=NAMES,
    default=(),
    metavar="COLUMN,...",
    help="the label columns; without it one is guessed",
)
@default_option(
    "--rows", type=count(), default=SAMPLE, help="rows of the sample, spread evenly over the data"
)
@click.option("--where", metavar="CONDITION", help="which rows are looked at")
@file_option("--schema", help="write the proposed schema there")
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
def command(
    path: str,
    label: tuple[str, ...],
    rows: int,
    where: str | None,
    schema: str | None,
    as_json: bool,
) -> None:
    """Look into data, a run or a checkpoint.

    Of data it reads a sample, and tells of every column its type, its distinct values, the lengths
    of its lists, its nulls, and whether it holds ids or numbers. It proposes a schema that trains
    as it stands, and names what looks wrong. Of a checkpoint it lists the tables, their sizes and
    the run's settings; of a run how it went, and its checkpoints.
    """
    from rayrec.checks import separate_files
    from rayrec.errors import ConfigError
    from rayrec.runs.inputs import output_path

    found = _kept(path)
    if found is not None:
        told = [f"--{name}" for name in ("label", "rows", "where", "schema") if is_said(name)]
        if told:
            raise ConfigError(f"{told[0]} is about data, and {path} is none; leave it out.")
        print(found.to_json() if as_json else found.to_text(), end="\n" * (not as_json))
        return
    from rayrec.data.inspect import inspect_data
    from rayrec.storage import write_whole

    separate_files({"--schema": schema}, {"the data": path})
    out = output_path("--schema", schema)
    report = inspect_data(path, label or None, rows, where)
    text = report.schema().to_json() if out is not None else ""
    print(report.to_json() if as_json else report.to_text(), end="\n" * (not as_json))
    if out is not None:
        write_whole("--schema", out, text)
        if not as_json:
            print(f"schema: {out}")


def _kept(path: str) -> CheckpointReport | RunReport | None:
    """Return a report on the checkpoint or run at `path`; None where it is neither."""
    from rayrec.checkpoint import checkpoint_path, inspect_checkpoint
    from rayrec.checkpoint.store import Store
    from rayrec.watch.described import describe_run

    folder = checkpoint_path("PATH", path)
    return inspect_checkpoint(folder) if Store(folder).has_manifest() else describe_run(folder)
