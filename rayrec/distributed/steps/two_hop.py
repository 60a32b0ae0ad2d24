"""The two-hop output route: sum inside the host, then exchange between hosts.

Where the row blocks of a column block fill a host, each of its L ranks holds a partial sum of every
bag. Hop 1 sums them inside the host, for the bags of the ranks with one local index (a
reduce-scatter); hop 2 sends the sums between the ranks of equal local index on all hosts. So 1 / L
of the flat route's bytes cross between hosts. Backward is the reverse: gradients go to the peer on
each host, which hands them to all ranks of its host. Sums are taken in rank order, so they repeat
bit for bit.
"""

# L ranks per host, H hosts, R rows (bags of one home rank), D columns of a host's two-hop slots

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.comm.codec import Codec, coded_all_to_all
from rayrec.comm.exchange import Exchange
from rayrec.distributed.program.slots import SlotTable
from rayrec.distributed.steps.route import RoutedIds
from rayrec.layout import ShardingPlan, takes_two_hops


@dataclass(frozen=True)
class Hops:
    """The two exchanges of the route: inside this rank's host, and between the ranks of equal local
    index.
    """

    host: Exchange
    peers: Exchange

    @staticmethod
    def of(exchange: Exchange, hosts: Sequence[Sequence[int]]) -> Hops:
        """Split all ranks both ways; every rank calls it."""
        return Hops(
            exchange.split(hosts),
            exchange.split([tuple(ranks) for ranks in zip(*hosts, strict=True)]),
        )

    @staticmethod
    def for_plan(exchange: Exchange, plan: ShardingPlan) -> Hops | None:
        """Where any table of the plan takes two hops; all ranks decide alike."""
        takes = any(
            takes_two_hops(placement.layout, plan.hosts) for placement in plan.tables.values()
        )
        return Hops.of(exchange, plan.hosts) if takes else None


@dataclass(frozen=True)
class HopSizes:
    """Rows and columns of one step on this rank.

    Attributes:
        rows: bags of every home rank, as this rank's host sends them.
        width: D of this rank's host.
        home: per host, (rows, columns) that come home to this rank.
    """

    rows: tuple[int, ...]
    width: int
    home: tuple[tuple[int, int], ...]
    local: tuple[tuple[int, ...], ...]  # per local index, the home ranks with it, by host

    @staticmethod
    def of(slots: SlotTable, rank: int, routed: RoutedIds) -> HopSizes:
        """From the sizes of a routed step."""
        mine = slots.ranks[rank]
        firsts = [host[0] for host in slots.hosts]
        home = tuple(
            (slots.ranks[r].hop.rows(routed.sent[r]), slots.ranks[r].hop.width) for r in firsts
        )
        return HopSizes(
            tuple(mine.hop.rows(s) for s in routed.got),
            mine.hop.width,
            home,
            tuple(zip(*slots.hosts, strict=True)),
        )


def send_home(
    hops: Hops, sizes: HopSizes, rows: Sequence[Tensor], codec: Codec | None, device: torch.device
) -> list[Tensor]:
    """Per host (R, D) sums of this rank's bags.

    Args:
        rows: output of this rank's two-hop kernels, each (bags of all ranks, width).
        device: where the sums lie, also those of a rank that has no such kernel.
    """
    width, local = sizes.width, hops.host.rank
    mine = sum(sizes.rows[r] for r in sizes.local[local])
    summed = torch.empty(0, device=device)
    if width:
        matrix = rows[0] if len(rows) == 1 else torch.cat(list(rows), 1)
        homes = matrix.split(list(sizes.rows))
        out = torch.cat([homes[r].reshape(-1) for group in sizes.local for r in group])
        out_sizes = [sum(sizes.rows[r] for r in group) * width for group in sizes.local]
        parts = hops.host.views(out, out_sizes, [mine * width] * hops.host.world_size).wait()
        summed = parts[0].clone()
        for part in parts[1:]:
            summed += part
    to_hosts = [sizes.rows[r] * width for r in sizes.local[local]]
    from_hosts = [count * columns for count, columns in sizes.home]
    arrived = coded_all_to_all(
        hops.peers, codec, summed, [[n] for n in to_hosts], [[n] for n in from_hosts]
    )
    return [part.view(shape) for part, shape in zip(arrived, sizes.home, strict=True)]


def send_back(hops: Hops, sizes: HopSizes, grads: Sequence[Tensor], codec: Codec | None) -> Tensor:
    """(bags of all ranks, D) gradient of this rank's two-hop columns.

    Args:
        grads: per host (R, D) gradient of its columns for this rank's bags.
    """
    width, local = sizes.width, hops.host.rank
    from_hosts = [sizes.rows[r] * width for r in sizes.local[local]]
    out = torch.cat([grad.reshape(-1) for grad in grads])
    parts = coded_all_to_all(
        hops.peers,
        codec,
        out,
        [[count * columns] for count, columns in sizes.home],
        [[n] for n in from_hosts],
    )
    arrived = torch.cat(parts)
    result = arrived.new_empty(sum(sizes.rows), width)
    if not width:
        return result
    per_local = [sum(sizes.rows[r] for r in group) * width for group in sizes.local]
    gathered = hops.host.all_gather(arrived, per_local).wait()
    homes = result.split(list(sizes.rows))
    for group, part in zip(sizes.local, gathered, strict=True):
        for r, rows in zip(group, part.split([sizes.rows[r] * width for r in group]), strict=True):
            homes[r].copy_(rows.view(-1, width))
    return result
