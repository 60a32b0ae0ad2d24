"""The ways a table may be laid out: templates, and the groups of ranks each may go to.

A template is a layout whose owners are positions 0 .. k-1; a placement is a template and k ranks,
ascending. So kinds differ by data: table_wise is one cell anywhere, row_wise k row blocks anywhere,
table_row_wise as many row blocks as a host has ranks on any host, grid_shard and data_parallel have
just one site. Templates that two kinds share on this topology are kept once, by the simpler kind.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rayrec.layout import kinds as shapes
from rayrec.layout.geometry import COLUMN_MULTIPLE, Layout, Replicated, TableLayout, weighted_cuts
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.layout.topology import Topology

SIMPLEST_FIRST = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A template and where it may go.

    Attributes:
        kind: the kind it was made for.
        template: a layout over positions 0 .. k-1.
        sites: groups of ranks; the template takes k ranks of one of them.
    """

    kind: str
    template: Layout
    sites: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """k, the ranks that the template needs."""
        return len(self.template.ranks)

    @property
    def family(self) -> tuple[bool, bool, bool]:
        """Kind wherever it lies: is it replicated, cut by rows, cut by columns?"""
        template = self.template
        if isinstance(template, Replicated):
            return True, False, False
        return False, template.num_row_blocks > 1, template.num_col_blocks > 1

    def place(self, ranks: Sequence[int]) -> Layout:
        """The layout with position i on the i-th of `ranks`, which ascend."""
        if isinstance(self.template, Replicated):
            return Replicated(*self.template.shape, tuple(ranks))
        owners = tuple(tuple(map(ranks.__getitem__, row)) for row in self.template.owners)
        return TableLayout(self.template.row_cuts, self.template.col_cuts, owners)


def _parts(most: int) -> list[int]:
    """1, 2, 4 ... below `most`, and `most`."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


@dataclass(frozen=True, slots=True)
class Sites:
    """Ranks and hosts that a table may use.

    Attributes:
        ranks: ascending.
        hosts: hosts all of whose ranks are allowed. by_size: these by number of ranks.
        whole: True if the ranks are the whole world.
        memory: bytes of each of the ranks where they differ, else empty.
    """

    ranks: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    by_size: dict[int, tuple[tuple[int, ...], ...]]
    whole: bool
    memory: tuple[int, ...] = ()


def find_sites(topology: Topology, allowed: Collection[int] | None = None) -> Sites:
    """The sites of a topology, or of those ranks of it that a table is pinned to."""
    ranks = tuple(rank for rank in topology.ranks if allowed is None or rank in allowed)
    kept = set(ranks)
    hosts = tuple(host for host in topology.hosts if kept.issuperset(host))
    sizes = sorted({len(host) for host in hosts})
    by_size = {n: tuple(host for host in hosts if len(host) == n) for n in sizes}
    memory = tuple(topology.memory_bytes[rank] for rank in ranks)
    memory = memory if len(set(memory)) > 1 else ()
    return Sites(ranks, hosts, by_size, len(ranks) == topology.world_size, memory)


def _one_kind(
    kind: str, table: BaseEmbeddingConfig, sites: Sites, columns: int
) -> Iterator[Candidate]:
    """All candidates of one kind; `columns` is the most column blocks that the table allows."""
    everywhere, world = (sites.ranks,), len(sites.ranks)
    if kind == "table_wise":
        yield Candidate(kind, shapes.table_wise(table, 0), everywhere)
    elif kind == "row_wise":
        # Fewer blocks than ranks are made on one host alone: on several, those of one host are
        # table_row_wise.
        for parts in _parts(world) if len(sites.hosts) <= 1 else [world]:
            yield Candidate(kind, shapes.row_wise(table, range(parts)), everywhere)
        if sites.memory and table.num_embeddings >= world * table.row_multiple:
            cuts = weighted_cuts(table.num_embeddings, sites.memory, table.row_multiple)
            column = tuple((position,) for position in range(world))
            template = TableLayout(cuts, (0, table.embedding_dim), column)
            yield Candidate(kind, template, everywhere)
    elif kind == "column_wise":
        for parts in _parts(min(columns, world)):
            yield Candidate(kind, shapes.column_wise(table, range(parts)), everywhere)
    elif kind == "table_row_wise":
        for size, hosts in sites.by_size.items():
            yield Candidate(kind, shapes.table_row_wise(table, range(size)), hosts)
    elif kind == "table_column_wise":
        for size, hosts in sites.by_size.items():
            for parts in _parts(min(columns, size)):
                yield Candidate(kind, shapes.table_column_wise(table, range(parts)), hosts)
    elif kind == "grid_shard":
        if len(sites.by_size) == 1:
            layout = shapes.grid_shard(table, sites.hosts[:columns])
            position = {rank: i for i, rank in enumerate(layout.ranks)}
            owners = tuple(tuple(map(position.__getitem__, row)) for row in layout.owners)
            template = TableLayout(layout.row_cuts, layout.col_cuts, owners)
            yield Candidate(kind, template, (layout.ranks,))
    elif sites.whole:
        yield Candidate(kind, shapes.data_parallel(table, sites.ranks), everywhere)


def enumerate_candidates(
    table: BaseEmbeddingConfig, sites: Sites, kinds: Sequence[str], min_partition: int | None = None
) -> tuple[Candidate, ...]:
    """All candidates of a table under the allowed kinds, simplest kind first.

    Args:
        sites: ranks and hosts that it may use.
        min_partition: narrowest column block; None means 4 columns.
    Returns:
        No candidate of a kind that has no meaning here: of grid_shard on hosts of unequal size, of
        data_parallel on some of the ranks, of table_row_wise and table_column_wise without a whole
        host.
    """
    columns = max(1, table.embedding_dim // (min_partition or COLUMN_MULTIPLE))
    candidates: dict[tuple[Layout, tuple[tuple[int, ...], ...]], Candidate] = {}
    for kind in SIMPLEST_FIRST:
        if kind in kinds:
            options = list(_one_kind(kind, table, sites, columns))
            # A kind that splits must split, unless the table is too small: one cell under any name.
            split = [c for c in options if kind == "table_wise" or c.num_ranks > 1]
            for candidate in split or options:
                candidates.setdefault((candidate.template, candidate.sites), candidate)
    return tuple(candidates.values())
