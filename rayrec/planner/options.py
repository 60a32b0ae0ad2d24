"""Candidates with their prices: what a table adds to each rank in seconds and bytes, wherever it
goes.

A piece of a template costs the same on all ranks whose hosts have equally many ranks, so a
candidate is priced once per size of host instead of once per placement; and the pieces of even cuts
have at most four shapes, so a template of a thousand pieces is priced by four. Tables that must
stay together become one `Item`, whose options are sums. Standard library only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.layout.plan import Storage
from rayrec.layout.topology import Topology
from rayrec.planner.candidates import Candidate
from rayrec.planner.costs import CostModel
from rayrec.planner.memory import home_buffer_bytes, owner_memory
from rayrec.planner.routes import summed_ranks
from rayrec.planner.work import TableWork, Traffic, shard_traffic


@dataclass(frozen=True, slots=True)
class Option:
    """A way to lay out the tables of one item, with its prices.

    Attributes:
        candidates: one per table, alike in kind, number of ranks and sites. storages: of their
            rows, one per table.
        seconds: seconds[locality][position], where a locality is a distinct number of ranks per
            host.
        num_bytes: owner's bytes by position. home_bytes: on every rank of the world.
        home_s: seconds on every rank of the world.
        num_ranks: positions. work_s: sum of seconds, where it is least. peak_s: the largest piece,
            where it is slowest.
        mean_s: what it adds to the mean rank, home included. most_bytes: what the rank with the
            largest piece must have free.
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


@dataclass(frozen=True, slots=True)
class Item:
    """Tables that are placed as one, and the ways to do it.

    Attributes:
        tables: indices of its tables.
        options: cheapest for the mean rank first, without those that another one beats wherever
            they go.
        families: of layouts cut along the same axes the cheapest each, cheapest first; for reports.
        rivals: items that must share no rank with it.
    """

    tables: tuple[int, ...]
    options: tuple[Option, ...]
    families: tuple[Option, ...] = ()
    rivals: tuple[int, ...] = ()

    @classmethod
    def of(cls, tables: tuple[int, ...], options: Sequence[Option]) -> Item:
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
    """Whether `a`, which costs no more for the mean rank, is at least as good wherever `b` goes, on
    no more ranks.
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
    if (
        isinstance(template, Replicated)
        or template.num_row_blocks < 2
        or candidate.num_ranks < len(site)
        or len(topology.hosts) < 2
    ):
        return 1
    key = (candidate.sites, template.num_row_blocks, template.num_col_blocks)
    if key not in routes:
        routes[key] = summed_ranks(candidate.place(site), topology.hosts)
    return routes[key]


def price_options(
    work: TableWork, candidates: Sequence[Candidate], costs: CostModel, routes: Routes | None = None
) -> tuple[Option, ...]:
    """Price every candidate of one table, once for each number of ranks per host.

    Args:
        routes: what other tables' candidates found, filled on.
    """
    routes = {} if routes is None else routes
    topology = costs.topology
    example = {len(host): host[0] for host in reversed(topology.hosts)}  # a rank of each locality
    known: dict[tuple[int, int, bool, int], tuple[tuple[float, ...], int, float, float]] = {}

    def piece(
        rows: int, cols: int, replicated: bool, summed: int
    ) -> tuple[tuple[float, ...], int, float, float]:
        """Seconds by locality, owner's bytes, and the traffic of one piece."""
        key = (rows, cols, replicated, summed)
        if key not in known:
            shards = [Shard("", range(rows), range(cols), 0)]
            seconds = tuple(
                costs.owner_cost(work, shards, rank, replicated, summed).total_s
                for rank in example.values()
            )
            traffic = shard_traffic(work, shards, summed)
            total = owner_memory(work, shards, costs.sparse_optimizer, summed).total
            known[key] = (seconds, total, traffic.id_bytes, traffic.row_bytes)
        return known[key]

    out = []
    for candidate in candidates:
        template = candidate.template
        summed = _summed(candidate, topology, routes) if work.pooled else 1
        if isinstance(template, Replicated):
            pieces = [piece(*template.shape, True, 1)] * candidate.num_ranks
        else:  # every position owns one cell
            heights, widths = _sizes(template.row_cuts), _sizes(template.col_cuts)
            rows = zip(heights, template.owners, strict=True)
            cells = sorted(
                (rank, h, w) for h, row in rows for w, rank in zip(widths, row, strict=True)
            )
            pieces = [piece(h, w, False, summed) for _, h, w in cells]
        replicated = isinstance(template, Replicated)
        total = Traffic(sum(p[2] for p in pieces), sum(p[3] for p in pieces))
        out.append(
            _option(
                (candidate,),
                (work.storage,),
                {size: tuple(p[0][i] for p in pieces) for i, size in enumerate(example)},
                tuple(p[1] for p in pieces),
                # sums in another order may round up
                home_buffer_bytes(work, total, _row_blocks(template)) + 1,
                costs.home_cost(
                    work, total, len(pieces), replicated, summed, _row_blocks(template)
                ).total_s,
                topology.world_size,
            )
        )
    return tuple(out)


def _row_blocks(template: Layout) -> int:
    return 1 if isinstance(template, Replicated) else template.num_row_blocks


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(cuts)]


def join_options(each: Sequence[Sequence[Option]], world_size: int) -> tuple[Option, ...]:
    """Options of tables that stay together: those that all tables have, with the same kind, ranks
    and sites, summed.

    Those whose storage is open take the same kind of it.
    """
    keyed: list[dict[Hashable, dict[str, Option]]] = []
    for options in each:
        keyed.append({})
        for o in options:
            keyed[-1].setdefault((o.kind, o.num_ranks, o.sites), {})[o.storages[0].kind] = o
    found = []
    for key in keyed[0]:
        ways = [other[key] for other in keyed if key in other]
        if len(ways) < len(keyed):
            continue
        fixed = [next(iter(way.values())) for way in ways]
        for kind in max(ways, key=len):  # one kind where no table's is open
            parts = [way.get(kind, alone) for way, alone in zip(ways, fixed, strict=True)]
            seconds: dict[int, tuple[float, ...]] = {
                size: tuple(map(sum, zip(*(p.seconds[size] for p in parts), strict=True)))
                for size in parts[0].seconds
            }
            num_bytes = tuple(map(sum, zip(*(p.num_bytes for p in parts), strict=True)))
            candidates = tuple(c for p in parts for c in p.candidates)
            storages = tuple(s for p in parts for s in p.storages)
            found.append(
                _option(
                    candidates,
                    storages,
                    seconds,
                    num_bytes,
                    sum(p.home_bytes for p in parts),
                    sum(p.home_s for p in parts),
                    world_size,
                )
            )
    return tuple(found)


def place_option(option: Option, ranks: Sequence[int]) -> tuple[Layout, ...]:
    """The layout of every table of the item, on `ranks`, which ascend."""
    return tuple(candidate.place(ranks) for candidate in option.candidates)
