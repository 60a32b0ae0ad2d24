"""Priced items for the search, made from tables and constraints.

An item is one table, or several that must lie together, with every allowed way to lay it out and
what each costs. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rayrec.errors import ConfigError, PlanError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.layout.topology import Topology
from rayrec.planner.candidates import Sites, enumerate_candidates, find_sites
from rayrec.planner.constraints import NO_CONSTRAINTS, ParameterConstraints, storages_of
from rayrec.planner.costs import CostModel
from rayrec.planner.options import Item, Option
from rayrec.planner.pricing import Routes, join_options, price_options
from rayrec.planner.work import TableWork


def kinds_of(limits: ParameterConstraints, kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds that a table and the planner both allow."""
    return tuple(kind for kind in kinds if limits.kinds is None or kind in limits.kinds)


def make_items(
    tables: Sequence[BaseEmbeddingConfig],
    works: Sequence[TableWork],
    constraints: Mapping[str, ParameterConstraints],
    kinds: Sequence[str],
    costs: CostModel,
) -> list[Item]:
    """The items of a planning problem, in order of their first table.

    Args:
        tables, works: the tables, and what a step does with each; alike in order.
        constraints: by table name; a table without any is free.
        kinds: sharding kinds that the planner may use.
        costs: prices of the topology, in seconds and bytes.
    Raises:
        PlanError: constraints leave a table, or tables that stay together, nothing to choose from.
        ConfigError: a pin names what does not exist, or two tables must be both together and apart.
    """
    # Routes and sites do not depend on the table, so thousands of tables share a few of them.
    routes: Routes = {}
    known: dict[frozenset[int] | None, Sites] = {}
    groups: dict[str, list[int]] = {}
    options: list[Sequence[Option]] = []
    for index, (table, work) in enumerate(zip(tables, works, strict=True)):
        limits = constraints.get(table.name, NO_CONSTRAINTS)
        try:
            allowed = limits.allowed(costs.topology)
        except ConfigError as error:
            raise ConfigError(f"table {table.name!r}: {error}") from None
        if allowed not in known:
            known[allowed] = find_sites(costs.topology, allowed)
        candidates = enumerate_candidates(
            table, known[allowed], kinds_of(limits, kinds), limits.min_partition
        )
        if not candidates:
            raise PlanError(_no_kind(table, limits, kinds, costs.topology))
        priced: list[Option] = []
        for storage in storages_of(table, limits, costs.topology.device):
            stored = replace(work, storage=storage)
            priced += price_options(stored, candidates, costs, routes)
        options.append(priced)
        # A table without a group is one by itself; no user's group begins with a null character.
        groups.setdefault(limits.together or f"\0{table.name}", []).append(index)
    items = []
    for group in groups.values():
        joined = options[group[0]]
        if len(group) > 1:
            joined = join_options([options[i] for i in group])
        if not joined:
            names = [tables[i].name for i in group]
            raise PlanError(
                f"tables {names} must lie together, but their constraints share no sharding kind "
                "and place. Allow one for all."
            )
        items.append(Item.from_options(tuple(group), joined))
    return _with_rivals(items, tables, constraints)


def _with_rivals(
    items: list[Item],
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
) -> list[Item]:
    """The items, each with those that hold another table of one of its apart groups."""
    members: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        for index in item.tables:
            group = constraints.get(tables[index].name, NO_CONSTRAINTS).apart
            if group is not None:
                if number in members.get(group, ()):
                    raise ConfigError(
                        f"table {tables[index].name!r} must lie together with a table of its apart "
                        f"group {group!r}."
                    )
                members.setdefault(group, []).append(number)
    rivals: dict[int, set[int]] = {}
    for group_members in members.values():
        for number in group_members:
            rivals.setdefault(number, set()).update(group_members)
    return [
        replace(item, rivals=tuple(sorted(rivals.get(number, set()) - {number})))
        for number, item in enumerate(items)
    ]


def _no_kind(
    table: BaseEmbeddingConfig,
    limits: ParameterConstraints,
    kinds: Sequence[str],
    topology: Topology,
) -> str:
    sizes = [len(host) for host in topology.hosts]
    shown = f"hosts of {sizes[:16]} ranks" if len(sizes) <= 16 else f"{len(sizes)} hosts"
    return (
        f"table {table.name!r} may use no sharding kind here: its constraints allow "
        f"{list(limits.kinds or kinds)}, the planner {list(kinds)}. On {shown}, grid_shard needs "
        "hosts of equal size, data_parallel all ranks, and table_row_wise and table_column_wise a "
        "whole host. Allow row_wise or table_wise."
    )
