"""A sharding plan as JSON, both ways.

Written for people to read, compare and edit: one line per table, cuts and owners as they are,
tables in plan order. "kind" is written for the reader and not read back. Reading trusts nothing:
every field has its type checked and every layout must tile.

    {"format": "rayrec.plan", "version": 1, "world_size": 2, "hosts": [[0, 1]], "tables": {
      "user": {"kind": "row_wise", "row_cuts": [0, 50, 100], "col_cuts": [0, 64], "owners": [[0],
      [1]], "storage": {"kind": "device"}}, "day": {"kind": "data_parallel", "shape": [7, 16],
      "replicated": [0, 1], "storage": {"kind": "device"}}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rayrec.errors import PlanError
from rayrec.fields.json_text import json_object, of_json
from rayrec.fields.writing import record_of
from rayrec.layout.estimates import PlanEstimates
from rayrec.layout.geometry import Replicated, TableLayout
from rayrec.layout.kinds import kind_of
from rayrec.layout.plan import ShardingPlan, Storage, TablePlacement

FORMAT = "rayrec.plan"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tiled:
    """A table in blocks, as a plan's file has it."""

    kind: Any = None
    row_cuts: tuple[int, ...]
    col_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    storage: Storage

    def placement(self) -> TablePlacement:
        return TablePlacement(TableLayout(self.row_cuts, self.col_cuts, self.owners), self.storage)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copied:
    """A table on every rank, as a plan's file has it."""

    kind: Any = None
    shape: tuple[int, int]
    replicated: tuple[int, ...]
    storage: Storage

    def placement(self) -> TablePlacement:
        if min(self.shape) < 1:
            raise PlanError(
                f"shape={list(self.shape)} must be [num_embeddings, embedding_dim], both positive."
            )
        return TablePlacement(Replicated(*self.shape, self.replicated), self.storage)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlanFile:
    """A plan's file."""

    format: str
    version: int
    world_size: int
    hosts: tuple[tuple[int, ...], ...]
    tables: Mapping[str, _Tiled | _Copied]
    estimates: PlanEstimates | None = None


def plan_to_json(plan: ShardingPlan) -> str:
    """The plan as text that `plan_from_json` reads; ends with a newline."""
    entries = {
        name: record_of(_table_record(placement, plan.hosts))
        for name, placement in plan.tables.items()
    }
    lines = [
        "{",
        f'  "format": "{FORMAT}",',
        f'  "version": {VERSION},',
        f'  "world_size": {plan.world_size},',
        f'  "hosts": {json.dumps(plan.hosts)},',
        f'  "tables": {_one_per_line(entries)}' + ("," if plan.estimates else ""),
    ]
    if plan.estimates:
        lines += _estimates_lines(record_of(plan.estimates))
    return "\n".join([*lines, "}"]) + "\n"


def _table_record(
    placement: TablePlacement, hosts: tuple[tuple[int, ...], ...]
) -> _Tiled | _Copied:
    layout, storage = placement.layout, placement.storage
    kind = kind_of(layout, hosts)
    if isinstance(layout, Replicated):
        return _Copied(kind=kind, shape=layout.shape, replicated=layout.ranks, storage=storage)
    cuts = {"row_cuts": layout.row_cuts, "col_cuts": layout.col_cuts}
    return _Tiled(kind=kind, **cuts, owners=layout.owners, storage=storage)


def _estimates_lines(estimates: dict[str, Any]) -> list[str]:
    ranks = ",".join(f"\n      {json.dumps(rank)}" for rank in estimates.pop("ranks"))
    tables = _one_per_line(estimates.pop("tables"), indent=4)
    return [
        '  "estimates": {',
        *(f"    {json.dumps(name)}: {json.dumps(value)}," for name, value in estimates.items()),
        f'    "ranks": [{ranks}\n    ],',
        f'    "tables": {tables}',
        "  }",
    ]


def _one_per_line(entries: dict[str, dict[str, Any]], indent: int = 2) -> str:
    pad = " " * indent
    lines = [f"\n{pad}  {json.dumps(name)}: {json.dumps(each)}" for name, each in entries.items()]
    return "{" + ",".join(lines) + f"\n{pad}" + "}"


def plan_from_json(text: str, source: str) -> ShardingPlan:
    """Read a plan.

    Args:
        source: name of the file, for errors.
    Raises:
        PlanError: names `source`, the table and the field.
    """
    data = json_object(text, source, PlanError)
    # The format and the version come first: of another file no other message would help.
    if data.get("format") != FORMAT:
        raise PlanError(
            f"{source}: format is {data.get('format')!r}, expected {FORMAT!r}; this is no sharding "
            "plan."
        )
    if data.get("version") != VERSION:
        raise PlanError(
            f"{source}: version is {data.get('version')!r}, this release reads version {VERSION}."
        )
    file = of_json(_PlanFile, data, source, PlanError)
    place = ""
    try:
        tables = {}
        for name, table in file.tables.items():
            place = f": tables.{name}"
            tables[name] = table.placement()
        place = ""
        estimates = _ordered(file.estimates, tuple(tables))
        plan = ShardingPlan(
            world_size=file.world_size, tables=tables, hosts=file.hosts, estimates=estimates
        )
    except PlanError as error:
        raise PlanError(f"{source}{place}: {error}") from None
    if estimates and {estimates.topology.world_size, len(estimates.ranks)} != {plan.world_size}:
        raise PlanError(
            f"{source}: estimates are for {len(estimates.ranks)} ranks, the plan has "
            f"world_size={plan.world_size}."
        )
    return plan


def _ordered(estimates: PlanEstimates | None, names: tuple[str, ...]) -> PlanEstimates | None:
    """The estimates with their tables in the order of the plan's."""
    if estimates is None:
        return None
    # The report reads an estimate for every table, so a plan whose tables were edited needs new
    # estimates or none.
    odd = sorted(set(estimates.tables) ^ set(names))
    if odd:
        raise PlanError(
            f"estimates.tables: table {odd[0]!r} is in the plan or in the estimates, but not in "
            "both."
        )
    return replace(estimates, tables={name: estimates.tables[name] for name in names})
