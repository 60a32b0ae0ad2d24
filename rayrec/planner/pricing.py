"""Prices of candidates: what a table adds to each rank in seconds and bytes, wherever it goes.

A piece of a template costs the same on all ranks whose hosts have equally many ranks, so a
candidate is priced once per size of host instead of once per placement; and the pieces of even cuts
have at most four shapes, so a template of a thousand pieces is priced by four. Options of tables
that must stay together are sums. Standard library only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

from rayrec.layout.geometry import Replicated, Shard
from rayrec.layout.topology import Topology
from rayrec.planner.candidates import Candidate
from rayrec.planner.costs import CostModel
from rayrec.planner.memory import home_buffer_bytes, owner_memory
from rayrec.planner.options import Option
from rayrec.planner.work import TableWork, Traffic, row_blocks, shard_traffic, summed_ranks

Routes = dict[tuple[tuple[tuple[int, ...], ...], int, int], int]


def _summed(candidate: Candidate, topology: Topology, routes: Routes) -> int:
    """`summed_ranks` of a candidate whose sites leave no choice of ranks; else 1."""
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
        # Every position owns one cell, so sorting by the owner gives the pieces by position.
        cells = []
        for height, owners in zip(heights, template.owners, strict=True):
            cells += [(rank, height, width) for width, rank in zip(widths, owners, strict=True)]
        return [self.piece(height, width, False, summed) for _, height, width in sorted(cells)]


def price_options(
    work: TableWork, candidates: Sequence[Candidate], costs: CostModel, routes: Routes | None = None
) -> tuple[Option, ...]:
    """Price every candidate of one table, once for each number of ranks per host.

    Args:
        routes: by sites and numbers of blocks, how many ranks of a host sum their rows before they
            go home. It holds what other tables' candidates needed; this table's are added.
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
            Option(
                candidates=(candidate,),
                storages=(work.storage,),
                seconds=seconds,
                num_bytes=tuple(piece.num_bytes for piece in pieces),
                # sums in another order may round up
                home_bytes=home_buffer_bytes(work, total, blocks) + 1,
                home_s=costs.seconds(at_home).total_s,
                world_size=costs.topology.world_size,
            )
        )
    return tuple(options)


def _sizes(cuts: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(cuts)]


def join_options(each: Sequence[Sequence[Option]]) -> tuple[Option, ...]:
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
            joined.append(_sum_options(parts))
    return tuple(joined)


def _sum_options(parts: Sequence[Option]) -> Option:
    seconds: dict[int, tuple[float, ...]] = {}
    for locality in parts[0].seconds:
        by_position = zip(*(part.seconds[locality] for part in parts), strict=True)
        seconds[locality] = tuple(map(sum, by_position))
    return Option(
        candidates=tuple(candidate for part in parts for candidate in part.candidates),
        storages=tuple(storage for part in parts for storage in part.storages),
        seconds=seconds,
        num_bytes=tuple(map(sum, zip(*(part.num_bytes for part in parts), strict=True))),
        home_bytes=sum(part.home_bytes for part in parts),
        home_s=sum(part.home_s for part in parts),
        world_size=parts[0].world_size,
    )
