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
from dataclasses import asdict, fields
from typing import Any

from rayrec.errors import ConfigError, PlanError
from rayrec.layout.estimates import PlanEstimates, RankEstimate, TableEstimate
from rayrec.layout.geometry import Layout, Replicated, TableLayout
from rayrec.layout.jsonfields import Fields, parse_object
from rayrec.layout.kinds import kind_of
from rayrec.layout.plan import ShardingPlan, Storage, TablePlacement
from rayrec.layout.topology import Topology

FORMAT = "rayrec.plan"
VERSION = 1


def plan_to_json(plan: ShardingPlan) -> str:
    """The plan as text that `plan_from_json` reads; ends with a newline."""
    entries = {
        name: _table_to_data(placement, plan.hosts) for name, placement in plan.tables.items()
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
        lines += _estimates_lines(plan.estimates)
    return "\n".join([*lines, "}"]) + "\n"


def _estimates_lines(estimates: PlanEstimates) -> list[str]:
    ranks = ",".join(f"\n      {json.dumps(asdict(rank))}" for rank in estimates.ranks)
    tables = {name: asdict(table) for name, table in estimates.tables.items()}
    return [
        '  "estimates": {',
        f'    "topology": {estimates.topology.to_json()},',
        f'    "batch_size": {estimates.batch_size},',
        f'    "sparse_optimizer": {json.dumps(estimates.sparse_optimizer)},',
        f'    "ranks": [{ranks}\n    ],',
        f'    "tables": {_one_per_line(tables, indent=4)}',
        "  }",
    ]


def _one_per_line(entries: dict[str, dict[str, Any]], indent: int = 2) -> str:
    pad = " " * indent
    lines = [f"\n{pad}  {json.dumps(name)}: {json.dumps(each)}" for name, each in entries.items()]
    return "{" + ",".join(lines) + f"\n{pad}" + "}"


def _table_to_data(placement: TablePlacement, hosts: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    layout = placement.layout
    data: dict[str, Any] = {"kind": kind_of(layout, hosts)}
    if isinstance(layout, Replicated):
        data |= {"shape": layout.shape, "replicated": layout.ranks}
    else:
        data |= asdict(layout)
    storage = asdict(placement.storage).items()
    return {**data, "storage": {name: value for name, value in storage if value is not None}}


def plan_from_json(text: str, source: str) -> ShardingPlan:
    """Read a plan.

    Args:
        source: name of the file, for errors.
    Raises:
        PlanError: names `source`, the table and the field.
    """
    root = parse_object(text, source)
    # The format and the version come first: of another file no other message would help.
    if (form := root.text("format")) != FORMAT:
        raise PlanError(
            f"{source}: format is {form!r}, expected {FORMAT!r}; this is no sharding plan."
        )
    if (version := root.integer("version")) != VERSION:
        raise PlanError(f"{source}: version is {version}, this release reads version {VERSION}.")
    world_size, hosts = root.integer("world_size"), root.int_rows("hosts")
    entries = root.child("tables")
    tables = {name: _table_from_fields(_named(entries, name, source)) for name in entries.keys()}  # noqa: SIM118
    estimates = root.optional("estimates", root.child)
    predicted = _estimates_from_fields(estimates, tuple(tables)) if estimates else None
    # Unknown fields are refused before the plan is checked: a misspelt name explains more than the
    # error that follows from it.
    root.finish()
    try:
        plan = ShardingPlan(world_size=world_size, tables=tables, hosts=hosts, estimates=predicted)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None
    if predicted and {predicted.topology.world_size, len(predicted.ranks)} != {world_size}:
        raise PlanError(
            f"{source}: estimates are for {len(predicted.ranks)} ranks, the plan has "
            f"world_size={world_size}."
        )
    return plan


def _named(entries: Fields, name: str, source: str) -> Fields:
    child = entries.child(name)
    child.where = f"{source}: table {name!r}"
    return child


def _table_from_fields(entry: Fields) -> TablePlacement:
    entry.skip("kind")
    try:
        storage = _storage_from_fields(entry.child("storage"))
        layout = _layout_from_fields(entry)
    except (PlanError, ConfigError) as error:
        # Errors of a field name the place already; errors of a layout or a storage do not know it.
        where = "" if str(error).startswith(entry.where) else f"{entry.where}: "
        raise PlanError(f"{where}{error}") from None
    entry.skip("storage")
    entry.finish()
    return TablePlacement(layout, storage)


def _storage_from_fields(entry: Fields) -> Storage:
    kind = entry.text("kind")
    factor = entry.optional("load_factor", entry.number)
    entry.finish()
    return Storage(kind, factor)  # type: ignore[arg-type]  # Storage checks it


def _layout_from_fields(entry: Fields) -> Layout:
    if not entry.has("replicated"):
        return TableLayout(entry.ints("row_cuts"), entry.ints("col_cuts"), entry.int_rows("owners"))
    shape = entry.ints("shape")
    if len(shape) != 2 or min(shape) < 1:
        raise PlanError(
            f"shape={list(shape)} must be [num_embeddings, embedding_dim], both positive."
        )
    return Replicated(*shape, entry.ints("replicated"))


def _estimates_from_fields(entry: Fields, names: tuple[str, ...]) -> PlanEstimates:
    per_table = entry.child("tables")
    # The report reads an estimate for every table, so a plan whose tables were edited needs new
    # estimates or none.
    if set(per_table.keys()) != set(names):
        odd = sorted(set(per_table.keys()) ^ set(names))
        raise PlanError(
            f"{per_table.where}: table {odd[0]!r} is in the plan or in the estimates, but not in "
            "both."
        )
    estimates = PlanEstimates(
        topology=Topology.from_fields(entry.child("topology")),
        batch_size=entry.integer("batch_size"),
        sparse_optimizer=entry.text("sparse_optimizer"),
        ranks=tuple(_rank_from_fields(rank) for rank in entry.children("ranks")),
        tables={name: _table_estimate_from_fields(per_table.child(name)) for name in names},
    )
    entry.finish()
    return estimates


def _rank_from_fields(entry: Fields) -> RankEstimate:
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(RankEstimate)):
        # The suffix of a field gives its unit, and the unit its type: bytes are whole, seconds are
        # not.
        values[name] = entry.integer(name) if name.endswith("_bytes") else entry.number(name)
    entry.finish()
    return RankEstimate(**values)


def _table_estimate_from_fields(entry: Fields) -> TableEstimate:
    estimate = TableEstimate(
        kind=entry.text("kind"),
        data_type=entry.text("data_type"),
        weight_bytes=entry.integer("weight_bytes"),
        why=entry.text("why"),
        work_s=entry.number("work_s"),
        runner_up=entry.optional("runner_up", entry.text),
        runner_up_work_s=entry.optional("runner_up_work_s", entry.number),
    )
    entry.finish()
    return estimate
