"""The report of the doctor as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.doctor.table_health import (
    HEADS,
    DoctorReport,
    TableHealth,
    cells_of,
    distances,
    percent,
)
from rayrec.layout.units import format_count
from rayrec.report.bars import stacks
from rayrec.report.charts import WIDTH
from rayrec.report.elements import beside, cell, facts, figure, grid, legend, page, section, table

PARTS = ("trained", "dead", "NaN or infinite", "free")
CHARTS = 24  # of norms; those of tables with findings come first


def render_doctor_page(report: DoctorReport) -> str:
    """Return the page of a report."""
    parts = [_facts(report), _findings(report)]
    if report.tables:
        parts += [_rows(report.tables), _norms(report), _numbers(report.tables), _missing(report)]
    return page(f"{report.path}: tables", parts, beside("filter.js") if report.tables else "")


def _facts(report: DoctorReport) -> str:
    named = [
        (report.kind, f"step {report.step:,}"),
        ("tables", f"{len(report.tables)}"),
        ("rows", format_count(sum(one.rows for one in report.tables))),
        ("findings", f"{len(report.findings)}"),
        ("grave", f"{sum(one.is_grave for one in report.findings)}"),
    ]
    named += [(f"distance {text}", f"{v:.3g}") for text, v in distances(report.parity).items()]
    return facts(named)


def _findings(report: DoctorReport) -> str:
    if not report.findings:
        return section("Findings", note="None.")
    rows = [
        [
            cell(one.table),
            cell(one.kind, "failed" if one.is_grave else ""),
            cell(one.says),
            cell(one.advice),
        ]
        for one in report.findings
    ]
    return section("Findings", table(["table", "finding", "what was found", "what to do"], rows))


def _rows(tables: Sequence[TableHealth]) -> str:
    columns, labels = [], []
    for number, one in enumerate(tables):
        broken = one.nan_rows + one.infinite_rows
        dead = one.dead_rows or 0
        counts = max(0, one.in_use - dead - broken), dead, broken, one.rows - one.in_use
        columns.append([count / one.rows for count in counts])
        labels.append(f"{number}: {one.name}, {one.rows:,} rows")
    chart = stacks(columns, labels, PARTS, percent)
    keys = legend([(f"p{part}", name) for part, name in enumerate(PARTS)])
    note = (
        "A bar per table, in the order of the numbers below. A dead row is one that no gradient "
        "has reached; where that is not known, its rows count as trained."
    )
    return section("Rows", keys, chart, note=note)


def _norms(report: DoctorReport) -> str:
    odd = {one.table for one in report.findings}
    chosen = sorted(report.tables, key=lambda one: one.name not in odd)[:CHARTS]
    drawn = []
    for one in chosen:
        if one.octaves:
            low, high = min(one.octaves), max(one.octaves)
            exponents = range(low, high + 1)
            counts = [[float(one.octaves.get(k, 0))] for k in exponents]
            labels = [f"{2.0**k:.3g} to {2.0 ** (k + 1):.3g}" for k in exponents]
            chart = stacks(counts, labels, ["rows"], format_count, width=WIDTH, first=low)
            drawn.append(figure(one.name, chart))
    left = len(report.tables) - len(chosen)
    note = "Rows by the power of two below their norm; rows of zeros are left out."
    if left:
        note = f"{note} Those of {left} tables are not drawn."
    return section("Norms", grid(drawn), note=note)


def _numbers(tables: Sequence[TableHealth]) -> str:
    rows = []
    for number, one in enumerate(tables):
        name, *numbers = cells_of(one)
        rows.append([cell(f"{number}"), cell(name), *(cell(text, "number") for text in numbers)])
    box = '<input id="filter" placeholder="filter, for example t_user" aria-label="filter tables">'
    return section("Tables", box, table(["", *HEADS], rows, "scroll plain"))


def _missing(report: DoctorReport) -> str:
    rows = [
        [cell(", ".join(kinds)), cell(why), cell(", ".join(names))]
        for (why, names), kinds in report.not_told().items()
    ]
    return section("Not told", table(["findings", "why", "tables"], rows)) if rows else ""
