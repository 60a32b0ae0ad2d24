"""`rayrec doctor`: what is wrong with the trained tables of a run, a checkpoint or an artifact."""

from __future__ import annotations

import click

from rayrec.cli.base import Command, file_option
from rayrec.cli.values import PATH


@click.command(
    cls=Command,
    needs="rayrec.doctor",
    examples="""
rayrec doctor runs/clicks
rayrec doctor runs/clicks@best --html doctor.html
rayrec doctor served/clicks --arrow tables.arrow
""",
)
@click.argument("path", type=PATH, metavar="RUN|CHECKPOINT|ARTIFACT")
@file_option("--html", help="write the report as one HTML page, too")
@file_option("--arrow", help="write the numbers as an Arrow file, a row per table")
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
def command(path: str, html: str | None, arrow: str | None, as_json: bool) -> None:
    """Read every row of the tables once, and say what is wrong with them and what to do.

    It finds NaN, infinite, huge and zero rows, rows that no gradient has reached, frozen tables,
    ids with too large a share, stale ids, full tables, refused and evicted ids, collisions of
    hashed values, and tables that are coarse in INT8. Of a run it takes the newest checkpoint. What
    is stored does not tell everything of every table: the report ends with what is missing, and
    why.
    """
    from rayrec.checks import separate_files
    from rayrec.doctor import examine
    from rayrec.doctor.doctor_page import render_doctor_page
    from rayrec.runs.inputs import output_path
    from rayrec.storage import write_whole

    separate_files({"--html": html, "--arrow": arrow}, {})
    page, table = output_path("--html", html), output_path("--arrow", arrow)
    report = examine(path)
    print(report.to_json() if as_json else report.to_text(), end="\n" * (not as_json))
    if page is not None:
        write_whole("the page", page, render_doctor_page(report))
    if table is not None:
        write_whole("the numbers", table, report.to_arrow_file())
    for name, written in (("page", page), ("table", table)):
        if written is not None and not as_json:
            print(f"{name}: {written}")
