"""Two hops: sum inside the host, then exchange between hosts.

Where the row blocks of a column block fill a host, each of its L ranks holds a partial sum of every
bag. Hop 1 sums them inside the host, for the bags of the ranks with one local index (a
reduce-scatter). Hop 2 sends the sums between the ranks of equal local index on all hosts. So 1 / L
of the bytes of a flat exchange cross between hosts. The backward pass is the reverse: gradients go
to the peer on each host, which hands them to all ranks of its host. Sums are taken in rank order,
so they repeat bit for bit.
"""

# L ranks per host, H hosts, R rows (bags of one home rank), D columns of a host's two-hop slots

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.comm.codec import Codecs, coded_all_to_all
from rayrec.comm.exchange import Exchange
from rayrec.distributed.steps.route import RoutedIds
from rayrec.distributed.ways.matrices import OwnerMatrices

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _HopSizes:
    """Rows and columns of one step on this rank.

    Attributes:
        rows: bags of every home rank, as this rank's host sends them.
        width: D of this rank's host.
        home: per host, (rows, columns) that come home to this rank.
    """

    rows: tuple[int, ...]
    width: int
    home: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TwoHop:
    """The two exchanges: inside this rank's host, and between the ranks of equal local index.

    Attributes:
        hosts: ranks by host.
        rank: this rank.
    """

    host: Exchange
    peers: Exchange
    hosts: tuple[tuple[int, ...], ...]
    rank: int
    codecs: Codecs

    @staticmethod
    def open(exchange: Exchange, hosts: Sequence[Sequence[int]], codecs: Codecs) -> TwoHop:
        """Split all ranks both ways; every rank calls it."""
        inside = exchange.split(hosts)
        between = exchange.split([tuple(ranks) for ranks in zip(*hosts, strict=True)])
        all_hosts = tuple(tuple(ranks) for ranks in hosts)
        return TwoHop(inside, between, all_hosts, exchange.rank, codecs)

    @property
    def _of_local(self) -> list[tuple[int, ...]]:
        """Per local index, the home ranks with it, by host."""
        return list(zip(*self.hosts, strict=True))

    def _sizes(self, owners: Sequence[OwnerMatrices], routed: RoutedIds) -> _HopSizes:
        mine, home = owners[self.rank].hop, []
        for ranks in self.hosts:  # all ranks of a host have the same columns and rows
            theirs = owners[ranks[0]].hop
            home.append((theirs.rows(routed.sent[ranks[0]]), theirs.width))
        return _HopSizes(tuple(mine.rows(s) for s in routed.got), mine.width, tuple(home))

    def send_home(
        self,
        owners: Sequence[OwnerMatrices],
        routed: RoutedIds,
        rows: Sequence[Tensor],
        device: torch.device,
    ) -> list[Tensor]:
        """Return per host the sums of this rank's bags: (R, D), R bags and D columns of that host.

        Hop 1: each rank of this host gets the rows for the home ranks with its local index, one run
        of values per peer, and sums them. Hop 2: each home rank gets its sums from every host.

        Args:
            owners: pooled rows that each rank looks up.
            rows: the outputs of this rank's kernels, each (bags of all ranks, width) float32.
            device: device of the sums; no kernel tells a rank that has none.
        """
        sizes, of_local = self._sizes(owners, routed), self._of_local
        width, local = sizes.width, self.host.rank
        counts = [[sizes.rows[r] * width for r in group] for group in of_local]
        summed = torch.empty(0, device=device)
        if width:
            matrix = rows[0] if len(rows) == 1 else torch.cat(list(rows), 1)
            homes = matrix.split(list(sizes.rows))
            out = torch.cat([homes[r].reshape(-1) for group in of_local for r in group])
            mine = [sum(counts[local])] * self.host.world_size
            parts = self.host.views(out, [sum(group) for group in counts], mine).wait()
            # In the order of the ranks, so that sums repeat. The exchange only lends the parts.
            summed = parts[0].clone()
            for part in parts[1:]:
                summed += part
        to_hosts = [[count] for count in counts[local]]
        from_hosts = [[count * columns] for count, columns in sizes.home]
        arrived = coded_all_to_all(self.peers, self.codecs.forward, summed, to_hosts, from_hosts)
        return [part.view(shape) for part, shape in zip(arrived, sizes.home, strict=True)]

    def send_back(
        self,
        owners: Sequence[OwnerMatrices],
        routed: RoutedIds,
        grads: Callable[[Shapes], list[Tensor]],
    ) -> Tensor:
        """Return (bags of all ranks, D): the gradient of this rank's two-hop columns.

        Args:
            grads: makes, given their shapes, per host (R, D) gradients for this rank's bags.
        """
        sizes, of_local = self._sizes(owners, routed), self._of_local
        width, local = sizes.width, self.host.rank
        # [local index][host]: the values for the home rank with this place
        counts = [[sizes.rows[r] * width for r in group] for group in of_local]
        out = torch.cat([grad.reshape(-1) for grad in grads(sizes.home)])
        to_hosts = [[count * columns] for count, columns in sizes.home]
        from_hosts = [[count] for count in counts[local]]
        parts = coded_all_to_all(self.peers, self.codecs.backward, out, to_hosts, from_hosts)
        arrived = torch.cat(parts)
        result = arrived.new_empty(sum(sizes.rows), width)
        # All ranks of a host have the same width, so none of them waits in the exchange below.
        if not width:
            return result
        gathered = self.host.all_gather(arrived, [sum(group) for group in counts]).wait()
        homes = result.split(list(sizes.rows))
        for group, group_counts, part in zip(of_local, counts, gathered, strict=True):
            for r, values in zip(group, part.split(group_counts), strict=True):
                homes[r].copy_(values.view(-1, width))
        return result
