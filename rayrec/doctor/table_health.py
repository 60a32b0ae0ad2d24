"""`DoctorReport`: the numbers of every table, the findings, and why others are not told."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pyarrow as pa

from rayrec.fields.kinds import field_types
from rayrec.layout.units import aligned, fit

NOT_KNOWN = "-"
_ARROW = {
    str: pa.string(),
    int: pa.int64(),
    int | None: pa.int64(),
    float | None: pa.float64(),
    Mapping[str, str]: pa.map_(pa.string(), pa.string()),
    Mapping[str, list[int]]: pa.map_(pa.string(), pa.list_(pa.int64())),
    Mapping[int, int]: pa.map_(pa.int64(), pa.int64()),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableHealth:
    """Numbers of a table; None where what is stored does not tell them.

    Attributes:
        rows, width: size of the table.
        data_type: how a value is stored.
        in_use: rows of ids that are known; all rows of a table that is not dynamic.
        zero_rows, nan_rows, infinite_rows: rows in use of zeros, with a NaN, and with an infinity.
        huge_rows: rows whose norm is at least `huge_norm`, about 100 times the median.
        norm_median, norm_p99, norm_max: of the finite rows that are not zero.
        octaves: exponent of a power of two -> rows whose norm lies from it to the next.
        dead_rows: rows that no gradient has reached.
        first_rows: rows that are as they began, bit for bit; unmoved_rows: those of them that a
            gradient has reached.
        hottest_1, hottest_10, hottest_100: share of the most used ids in all uses.
        hottest_id: id or row number of the most used.
        heat: what counts as a use: "look-ups" or "squared gradients".
        idle_rows: ids that were last seen in the first half of the steps.
        age_median, age_p90: steps since ids were seen.
        blocks, full_blocks: blocks of a dynamic table, and those whose rows are all in use.
        admitted, evicted, refused, looked_up, unknown: counts of ids over the run.
        lost_ids, returned_ids: ids that lost their row from one checkpoint to the next, and those
            of them that had one again in the checkpoint after it.
        distinct_values: about how many different values were hashed into the buckets.
        collided: share of these that share their bucket.
        error_fp16, error_int8, error_int4: error of a packed row over its norm, the mean of many.
        examples: finding -> row numbers or ids of some of its rows.
        not_told: finding -> why it is not told.
    """

    name: str
    rows: int
    width: int
    data_type: str
    in_use: int
    zero_rows: int
    nan_rows: int
    infinite_rows: int
    huge_rows: int
    huge_norm: float | None = None
    norm_median: float | None = None
    norm_p99: float | None = None
    norm_max: float | None = None
    octaves: Mapping[int, int] = field(default_factory=dict)
    dead_rows: int | None = None
    first_rows: int | None = None
    unmoved_rows: int | None = None
    hottest_1: float | None = None
    hottest_10: float | None = None
    hottest_100: float | None = None
    hottest_id: int | None = None
    heat: str = ""
    idle_rows: int | None = None
    age_median: float | None = None
    age_p90: float | None = None
    blocks: int | None = None
    full_blocks: int | None = None
    admitted: int | None = None
    evicted: int | None = None
    refused: int | None = None
    looked_up: int | None = None
    unknown: int | None = None
    lost_ids: int | None = None
    returned_ids: int | None = None
    distinct_values: float | None = None
    collided: float | None = None
    error_fp16: float | None = None
    error_int8: float | None = None
    error_int4: float | None = None
    examples: Mapping[str, list[int]] = field(default_factory=dict)
    not_told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a table that asks for action.

    Attributes:
        table: its name.
        kind: the finding, such as "NaN rows".
        says: what was found, with numbers.
        advice: what to do.
        is_grave: the table is broken; others are worth a look.
    """

    table: str
    kind: str
    says: str
    advice: str
    is_grave: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """What the rows of a checkpoint or an artifact tell.

    Attributes:
        path: its folder.
        kind: which of the two it is.
        step: training step of its rows.
        tables: numbers of the tables, in the order of the model.
        findings: grave ones first.
        parity: distances of an artifact's scores from the trained model's, measured at its export.
    """

    path: str
    kind: Literal["checkpoint", "artifact"]
    step: int
    tables: tuple[TableHealth, ...]
    findings: tuple[Finding, ...]
    parity: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_arrow(self) -> pa.Table:
        """Return the numbers as an Arrow table of one row per table, with the kinds of findings."""
        types = field_types(TableHealth)
        schema = [pa.field(name, _ARROW[kind]) for name, kind in types.items()]
        schema.append(pa.field("findings", pa.list_(pa.string())))
        rows = []
        for table in self.tables:
            kinds = [one.kind for one in self.findings if one.table == table.name]
            values = {name: getattr(table, name) for name in types}
            maps = {n: list(v.items()) for n, v in values.items() if isinstance(v, Mapping)}
            rows.append({**values, **maps, "findings": kinds})
        return pa.Table.from_pylist(rows, pa.schema(schema))

    def to_arrow_file(self) -> bytes:
        """Return the Arrow IPC file of `to_arrow`."""
        table, buffer = self.to_arrow(), io.BytesIO()
        with pa.ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
        return buffer.getvalue()

    def to_text(self) -> str:
        """Return the report for people: findings, a line for each table, and what is missing."""
        rows = sum(table.rows for table in self.tables)
        lines = [
            f"{self.path}: {self.kind} of step {self.step:,}, {len(self.tables)} tables of "
            f"{rows:,} rows, {len(self.findings)} findings"
        ]
        for one in self.findings:
            sign = "!" if one.is_grave else "-"
            lines += [f"{sign} {one.table}: {one.kind}: {one.says}", f"    {one.advice}"]
        lines += ["", *aligned([HEADS, *(cells_of(table) for table in self.tables)])]
        if self.parity:
            told = [f"{name} {value:.3g}" for name, value in distances(self.parity).items()]
            lines += ["", f"distance from the trained model: {', '.join(told)}"]
        missing = self.not_told()
        if missing:
            lines += ["", "not told:"]
            for (why, tables), kinds in missing.items():
                lines.append(f"  {', '.join(kinds)} of {fit(', '.join(tables), 40)}: {why}")
        return "\n".join(lines)

    def not_told(self) -> dict[tuple[str, tuple[str, ...]], list[str]]:
        """Return reason and tables -> the findings that are not told of them for it."""
        tables: dict[tuple[str, str], list[str]] = {}
        for table in self.tables:
            for kind, why in table.not_told.items():
                tables.setdefault((kind, why), []).append(table.name)
        kinds: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for (kind, why), names in tables.items():
            kinds.setdefault((why, tuple(names)), []).append(kind)
        return kinds


HEADS = (
    "table", "rows", "in use", "dead", "first", "zero", "NaN", "inf", "huge", "median norm",
    "hottest 1/10/100", "idle", "collided", "fp16", "int8", "int4",
)  # fmt: skip


def cells_of(table: TableHealth) -> tuple[str, ...]:
    """Return the numbers of a table as texts, in the order of `HEADS`."""
    shares = [table.hottest_1, table.hottest_10, table.hottest_100]
    hottest = NOT_KNOWN if table.hottest_1 is None else "/".join(map(percent, shares))
    counts = table.zero_rows, table.nan_rows, table.infinite_rows, table.huge_rows
    return (
        fit(table.name, 32),
        f"{table.rows:,}",
        f"{table.in_use:,}",
        _count(table.dead_rows),
        _count(table.first_rows),
        *map(_count, counts),
        NOT_KNOWN if table.norm_median is None else f"{table.norm_median:.3g}",
        hottest,
        _count(table.idle_rows),
        *map(percent, (table.collided, table.error_fp16, table.error_int8, table.error_int4)),
    )


def percent(share: float | None) -> str:
    """Return a share in percent, with two figures where it is small."""
    if share is None:
        return NOT_KNOWN
    return f"{100 * share:.2g}%" if share < 0.0995 else f"{100 * share:.0f}%"


def _count(number: int | None) -> str:
    return NOT_KNOWN if number is None else f"{number:,}"


def distances(parity: Mapping[str, Any]) -> dict[str, float]:
    """Return the distances among what an export has measured, by names for people."""
    shown = {"max_logit_error": "largest of a logit", "auc_difference": "of the AUC"}
    return {text: parity[name] for name, text in shown.items() if name in parity}
