"""A sharding plan: table name -> layout and storage.

The planner writes it, ranks obey it, checkpoints record it. It is plain, picklable data. Tables
keep their order, which is the order of slots on every rank. A plan is checked twice: here, that it
makes sense by itself (owners are ranks of its world, replicas are on all of them), and by `check`,
that it is a plan for these tables on this world. JSON, diff and report live in modules of their
own. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn, get_args

from rayrec.errors import ConfigError, PlanError
from rayrec.fields.kinds import STATED
from rayrec.layout.estimates import PlanEstimates
from rayrec.layout.geometry import Layout, Replicated, Shard, TableLayout
from rayrec.layout.kinds import kind_of
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.layout.topology import check_hosts
from rayrec.layout.whole_file import write_file

StorageKind = Literal["device", "host", "cached"]
MOST_RANKS = 1 << 20  # of a plan; a file may say any number, and the ranks are listed


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory of a table's rows: on the device, in the host's memory, or there with a cache.

    Attributes:
        load_factor: share of its rows, above 0 and up to 1, that the cache of a "cached" table
            holds; None for the others.
    Raises:
        ConfigError: the kind is unknown, or the load factor is missing, makes no sense or is not
            for this kind.
    """

    kind: StorageKind = field(default="device", metadata=STATED)
    load_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(StorageKind):
            raise ConfigError(
                f"storage kind {self.kind!r} is unknown; use one of "
                f"{', '.join(get_args(StorageKind))}."
            )
        if self.kind == "cached" and (self.load_factor is None or not 0 < self.load_factor <= 1):
            raise ConfigError(
                "cached storage needs a load_factor above 0 and up to 1: the share of rows in the "
                f"cache; got {self.load_factor}."
            )
        if self.kind != "cached" and self.load_factor is not None:
            raise ConfigError(
                f"load_factor={self.load_factor} is for cached storage; leave it out for "
                f"{self.kind!r}."
            )

    @property
    def label(self) -> str:
        """Text for people: "device", "host", "cached 20%"."""
        share = "" if self.load_factor is None else f" {100 * self.load_factor:.3g}%"
        return f"{self.kind}{share}"


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """One table's layout and storage."""

    layout: Layout
    storage: Storage = field(default_factory=Storage)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """The rank and the memory of every rectangle of every table.

    Attributes:
        world_size: ranks that the plan is for.
        tables: placement by table name; the order is kept.
        hosts: ranks by host; one host with all ranks when not given.
        estimates: the planner's predictions; no part of equality.
    Raises:
        PlanError: an owner is no rank of the world, a replicated table is not on every rank, or
            hosts are not the world's ranks.
    """

    world_size: int
    tables: Mapping[str, TablePlacement]
    hosts: tuple[tuple[int, ...], ...] = ()
    estimates: PlanEstimates | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise PlanError(f"a plan needs at least one rank, got world_size={self.world_size}.")
        if self.world_size > MOST_RANKS:
            raise PlanError(
                f"world_size={self.world_size} is beyond {MOST_RANKS}, the most ranks of a plan."
            )
        hosts = tuple(map(tuple, self.hosts)) or (tuple(range(self.world_size)),)
        # The plan is frozen, so it keeps a dictionary of its own: a later change of the argument
        # must not change the plan.
        object.__setattr__(self, "tables", dict(self.tables))
        object.__setattr__(self, "hosts", hosts)
        try:
            check_hosts(self.hosts)
        except ConfigError as error:
            raise PlanError(str(error)) from None
        if (named := sum(len(host) for host in self.hosts)) != self.world_size:
            raise PlanError(f"hosts name {named} ranks, the plan has world_size={self.world_size}.")
        # Replicas stay equal because every rank makes every update, so all ranks must hold one.
        for name, placement in self.tables.items():
            if not isinstance(placement, TablePlacement):
                raise PlanError(
                    f"table {name!r} has a {type(placement).__name__} in the plan; give "
                    "TablePlacement(layout)."
                )
            layout = placement.layout
            if isinstance(layout, Replicated) and set(layout.ranks) != set(range(self.world_size)):
                raise PlanError(
                    f"table {name!r} is replicated on ranks {layout.ranks}; it must be on all "
                    f"{self.world_size} ranks."
                )
            if max(layout.ranks) >= self.world_size:
                raise PlanError(
                    f"table {name!r} has a shard on rank {max(layout.ranks)}, the plan has ranks 0 "
                    f"to {self.world_size - 1}."
                )

    def shards(self, rank: int | None = None) -> tuple[Shard, ...]:
        """All shards, or those of one rank, table by table in the plan's order."""
        shards: list[Shard] = []
        for name, placement in self.tables.items():
            shards += placement.layout.shards(name)
        return tuple(shard for shard in shards if rank is None or shard.rank == rank)

    def kind(self, table: str) -> str:
        """Name of the sharding kind of a table, for people."""
        return kind_of(self.tables[table].layout, self.hosts)

    def check(self, tables: Sequence[BaseEmbeddingConfig], world_size: int) -> None:
        """Check that this is a plan for these tables on a world of `world_size` ranks.

        Raises:
            PlanError: another world, a table missing, unknown, or of another shape; names the table
                and the numbers.
        """
        if world_size != self.world_size:
            raise PlanError(
                f"the plan is for {self.world_size} ranks, the world has {world_size}. Make a plan "
                f"for {world_size} ranks."
            )
        wanted = {table.name: table for table in tables}
        if missing := [name for name in wanted if name not in self.tables]:
            raise PlanError(
                f"the plan has no table {missing[0]!r} ({len(missing)} of the model's "
                f"{len(wanted)} tables are missing)."
            )
        if extra := [name for name in self.tables if name not in wanted]:
            raise PlanError(
                f"the plan places table {extra[0]!r}, which the model does not have ({len(extra)} "
                "such tables)."
            )
        for name, table in wanted.items():
            planned = self.tables[name].layout.shape
            shape = table.num_embeddings, table.embedding_dim
            if planned != shape:
                raise PlanError(
                    f"the plan lays out table {name!r} as {planned[0]} x {planned[1]}, the model "
                    f"has {shape[0]} x {shape[1]}. Make a new plan for the changed table."
                )
            layout = self.tables[name].layout
            cuts = layout.row_cuts if isinstance(layout, TableLayout) else ()
            if any(cut % table.row_multiple for cut in cuts):
                raise PlanError(
                    f"the plan cuts the dynamic table {name!r} at rows {cuts}, which must be "
                    f"multiples of {table.row_multiple}, the rows of its blocks. Make a new plan."
                )

    @property
    def rows(self) -> dict[str, int]:
        """Rows of every table."""
        return {name: placement.layout.shape[0] for name, placement in self.tables.items()}

    def with_rows(self, rows: Mapping[str, int]) -> ShardingPlan:
        """Return the plan of tables with other numbers of rows, cut at the same shares of them."""
        tables = dict(self.tables)
        for name, wanted in rows.items():
            layout = tables[name].layout
            now = layout.shape[0]
            if isinstance(layout, TableLayout):
                cuts = tuple(cut * wanted // now for cut in layout.row_cuts)
                layout = replace(layout, row_cuts=cuts)
            else:
                layout = replace(layout, num_embeddings=wanted)
            tables[name] = replace(tables[name], layout=layout)
        return replace(self, tables=tables)

    @property
    def plan(self) -> NoReturn:
        """TorchRec's mapping from module to parameter, which a plan by table does not have.

        Raises:
            ConfigError: always; says what to read.
        """
        raise ConfigError(
            "a ShardingPlan has no plan by module: tables[name] is a table's placement, "
            "kind(name) its sharding kind, and shards(rank) what a rank holds."
        )

    def to_json(self) -> str:
        """Human-readable JSON, one line per table; the same plan always gives the same text."""
        # the codec builds plans, so it comes above this module
        from rayrec.layout.codec import plan_to_json

        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> ShardingPlan:
        """Read what `to_json` wrote, or what a person wrote in its form.

        Raises:
            PlanError: names `source`, the table and the field.
        """
        from rayrec.layout.codec import plan_from_json

        return plan_from_json(text, source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON to a local file, which a reader sees whole: the old one or the new."""
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Read a local JSON file.

        Raises:
            PlanError: names the file, the table and the field; also when the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {error}") from None
        return cls.from_json(text, source=os.fspath(path))

    def diff(self, other: ShardingPlan, tables: Sequence[BaseEmbeddingConfig] | None = None) -> str:
        """Return the changes from this plan to `other`, table by table, as text.

        Args:
            tables: the model's tables; with them, moved bytes are told instead of elements.
        """
        from rayrec.layout.diff import diff_plans

        return diff_plans(self, other, tables)

    def report(self) -> str:
        """Ranks and tables as a plain text table of at most 100 columns."""
        from rayrec.layout.plan_text import render_plan

        return render_plan(self)
