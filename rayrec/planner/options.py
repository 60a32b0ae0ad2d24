"""Candidates with their prices: what a table adds to each rank in seconds and bytes.

A piece of a template costs the same on all ranks whose hosts have equally many ranks, so a
candidate is priced once per size of host instead of once per placement; and the pieces of even cuts
have at most four shapes, so a template of a thousand pieces is priced by four. Tables that must
stay together become one `Item`, whose options are sums. Standard library only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.layout.plan import Storage
from rayrec.layout.topology import Topology
from rayrec.planner.candidates import Candidate
from rayrec.planner.costs import CostModel
from rayrec.planner.memory import home_buffer_bytes, owner_memory
from rayrec.planner.work import TableWork, Traffic, row_blocks, shard_traffic, summed_ranks


@dataclass(frozen=True, slots=True)
class Option:
    """A way to lay out the tables of one item, with its prices.

    A locality is a distinct number of ranks per host; a position is one of the ranks it takes.

    Attributes:
        candidates: one per table, alike in kind, number of ranks and sites.
        storages: of their rows, one per table.
        seconds: seconds[locality][position].
        num_bytes: owner's bytes by position.
        home_bytes, home_s: what it asks of every rank of the world.
        num_ranks: positions.
        work_s: sum of the seconds of all positions, in the locality where it is least.
        peak_s: the largest piece, in the locality where it is slowest.
        mean_s: what it adds to the mean rank, home included.
        most_bytes: what the rank with the largest piece must have free.
    """

    candidates: tuple[Candidate, ...]
    storages: tuple[Storage, ...]
    seconds: dict[int, tuple[float, ...]]
    num_bytes: tuple[int, ...]
    home_bytes: int
    home_s: float
    num_ranks: int
    work_s: float
    peak_s: float
    mean_s: float
    most_bytes: int

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks; the option takes `num_ranks` of one of them."""
        return self.candidates[0].sites

    @property
    def kind(self) -> str:
        """The kind it was made for."""
        return self.candidates[0].kind

    @property
    def replicated(self) -> bool:
        """Whether every rank holds a copy."""
        return isinstance(self.candidates[0].template, Replicated)

    @property
    def family(self) -> tuple[bool, bool, bool]:
        """What layouts of one kind have in common, wherever they lie."""
        return self.candidates[0].family

    def layouts(self, ranks: Sequence[int]) -> tuple[Layout, ...]:
        """The layout of every table of the item, on `ranks`, which ascend."""
        return tuple(candidate.place(ranks) for candidate in self.candidates)


@dataclass(frozen=True, slots=True)
class Item:
    """Tables that are placed as one, and the ways to do it.

    Attributes:
        tables: indices of its tables.
        options: cheapest for the mean rank first, without those that another one beats wherever
            they go.
        families: the cheapest layout of each family, cheapest first; for reports.
        rivals: items that must share no rank with it.
    """

    tables: tuple[int, ...]
    options: tuple[Option, ...]
    families: tuple[Option, ...] = ()
    rivals: tuple[int, ...] = ()

    @classmethod
    def from_options(cls, tables: tuple[int, ...], options: Sequence[Option]) -> Item:
        """An item from all options of its tables."""
        # simpler kinds first among equals
        ordered = sorted(options, key=lambda option: option.mean_s)
        families: dict[tuple[bool, bool, bool], Option] = {}
        kept: list[Option] = []
        for option in ordered:
            families.setdefault(option.family, option)
            if not any(_beats(other, option) for other in kept):
                kept.append(option)
        return cls(tables, tuple(kept), tuple(families.values()))


def _beats(a: Option, b: Option) -> bool:
    """Whether `a` is at least as good wherever `b` goes, on no more ranks.

    It is asked only where `a` costs no more for the mean rank.
    """
    return (
        a.num_ranks <= b.num_ranks
        and a.peak_s <= b.peak_s
        and a.home_s <= b.home_s
        and a.most_bytes <= b.most_bytes
        and a.home_bytes <= b.home_bytes
        and (
            a.num_ranks < b.num_ranks
            or not _is_uneven(b)
            or all(x <= y for x, y in zip(a.num_bytes, b.num_bytes, strict=True))
        )
        and len(a.sites) == 1
        and (len(a.sites[0]) > a.num_ranks or a.sites == b.sites)
        and set(b.sites[0]) <= set(a.sites[0])
        and len(b.sites[0]) <= len(a.sites[0])
    )


def _is_uneven(option: Option) -> bool:
    return min(option.num_bytes) < 0.8 * max(option.num_bytes)


def _option(
    candidates: tuple[Candidate, ...],
    storages: tuple[Storage, ...],
    seconds: dict[int, tuple[float, ...]],
    num_bytes: tuple[int, ...],
    home_bytes: int,
    home_s: float,
    world_size: int,
) -> Option:
    work_s = min(sum(values) for values in seconds.values())
    return Option(
        candidates=candidates,
        storages=storages,
        seconds=seconds,
        num_bytes=num_bytes,
        home_bytes=home_bytes,
        home_s=home_s,
        num_ranks=len(num_bytes),
        work_s=work_s,
        peak_s=max(max(values) for values in seconds.values()),
        mean_s=work_s / world_size + home_s,
        most_bytes=max(num_bytes) + home_bytes,
    )


Routes = dict[tuple[tuple[tuple[int, ...], ...], int, int], int]


def _summed(candidate: Candidate, topology: Topology, routes: Routes) -> int:
    """`summed_ranks` of a candidate whose sites leave no choice of ranks; else 1, the dearer route."""
    template, site = candidate.template, candidate.sites[0]
    if isinstance(template, Replicated) or template.num_row_blocks < 2 or len(topology.hosts) < 2:
        return 1
    if candidate.num_ranks < len(site):
        return 1
    key = (candidate.sites, template.num_row_blocks, template.num_col_blocks)
    if key not in routes:
        routes[key] = summed_ranks(candidate.place(site), topology.hosts)
    return routes[key]


class _Piece(NamedTuple):
    """One cell of a template: seconds by locality, the owner's bytes, and its traffic."""

    seconds: tuple[float, ...]
    num_bytes: int
    traffic: Traffic


class _Pricer:
    """Prices the pieces of one table, each shape once."""

    def __init__(self, work: TableWork, costs: CostModel) -> None:
        self.work, self.costs = work, costs
        # locality -> a rank of a host of that size
        self.example = {len(host): host[0] for host in reversed(costs.topology.hosts)}
        self._known: dict[tuple[int, int, bool, int], _Piece] = {}

    def piece(self, rows: int, cols: int, replicated: bool, summed: int) -> _Piece:
        key = (rows, cols, replicated, summed)
        if key not in self._known:
            shards = [Shard("", range(rows), range(cols), 0)]
            costs = self.costs
            seconds = []
            for rank in self.example.values():
                amounts = costs.owner_amounts(self.work, shards, rank, replicated, summed)
                seconds.append(costs.seconds(amounts).total_s)
            num_bytes = owner_memory(self.work, shards, costs.sparse_optimizer, summed).total
            traffic = shard_traffic(self.work, shards, summed)
            self._known[key] = _Piece(tuple(seconds), num_bytes, traffic)
        return self._known[key]

    def pieces(self, candidate: Candidate, summed: int) -> list[_Piece]:
        """The piece of every position."""
        template = candidate.template
        if isinstance(template, Replicated):
            return [self.piece(*template.shape, True, 1)] * candidate.num_ranks
        heights, widths = _sizes(template.row_cuts), _sizes(template.col_cuts)
        cells = []  # every position owns one cell
        for height, owners in zip(heights, template.owners, strict=True):
            cells += [(rank, height, width) for width, rank in zip(widths, owners, strict=True)]
        return [self.piece(height, width, False, summed) for _, height, width in sorted(cells)]


def price_options(
    work: TableWork, candidates: Sequence[Candidate], costs: CostModel, routes: Routes | None = None
) -> tuple[Option, ...]:
    """Price every candidate of one table, once for each number of ranks per host.

    Args:
        routes: what was found for the candidates of other tables; this table's are added.
    """
    routes = {} if routes is None else routes
    pricer = _Pricer(work, costs)
    options = []
    for candidate in candidates:
        template = candidate.template
        summed = _summed(candidate, costs.topology, routes) if work.pooled else 1
        pieces = pricer.pieces(candidate, summed)
        replicated, blocks = isinstance(template, Replicated), row_blocks(template)
        id_bytes = sum(piece.traffic.id_bytes for piece in pieces)
        total = Traffic(id_bytes, sum(piece.traffic.row_bytes for piece in pieces))
        at_home = costs.home_amounts(work, total, len(pieces), replicated, summed, blocks)
        seconds = {}
        for i, locality in enumerate(pricer.example):
            seconds[locality] = tuple(piece.seconds[i] for piece in pieces)
        options.append(
            _option(
                (candidate,),
                (work.storage,),
                seconds,
                tuple(piece.num_bytes for piece in pieces),
                # sums in another order may round up
                home_buffer_bytes(work, total, blocks) + 1,
                costs.seconds(at_home).total_s,
                costs.topology.world_size,
            )
        )
    return tuple(options)


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(cuts)]


def join_options(each: Sequence[Sequence[Option]], world_size: int) -> tuple[Option, ...]:
    """Options of tables that stay together, summed.

    Those remain that all tables have, with the same kind, ranks and sites. Tables whose storage is
    open take the same kind of it.
    """
    # per table: kind and place -> kind of storage -> option
    keyed: list[dict[Hashable, dict[str, Option]]] = []
    for options in each:
        keyed.append({})
        for o in options:
            keyed[-1].setdefault((o.kind, o.num_ranks, o.sites), {})[o.storages[0].kind] = o
    joined = []
    for key in keyed[0]:
        ways = [other[key] for other in keyed if key in other]
        if len(ways) < len(keyed):
            continue
        fixed = [next(iter(way.values())) for way in ways]
        for kind in max(ways, key=len):  # one kind where no table's is open
            parts = [way.get(kind, alone) for way, alone in zip(ways, fixed, strict=True)]
            joined.append(_sum_options(parts, world_size))
    return tuple(joined)


def _sum_options(parts: Sequence[Option], world_size: int) -> Option:
    seconds: dict[int, tuple[float, ...]] = {}
    for locality in parts[0].seconds:
        by_position = zip(*(part.seconds[locality] for part in parts), strict=True)
        seconds[locality] = tuple(map(sum, by_position))
    return _option(
        tuple(candidate for part in parts for candidate in part.candidates),
        tuple(storage for part in parts for storage in part.storages),
        seconds,
        tuple(map(sum, zip(*(part.num_bytes for part in parts), strict=True))),
        sum(part.home_bytes for part in parts),
        sum(part.home_s for part in parts),
        world_size,
    )
