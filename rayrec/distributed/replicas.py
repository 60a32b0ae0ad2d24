"""2D parallelism: groups of ranks each shard all tables, and are replicas of each other.

With W ranks and groups of S, ranks 0 .. S - 1 are the first group; the same plan for S ranks holds
in every group, and the ids of a rank never leave its group. With k = 1 replicas exchange ids and
gradients instead (`peers`) and train exactly as one world of W ranks. With a larger k they drift
apart as their groups see other rows, and every k steps the rows and optimizer state of equal shards
are averaged over the groups. The dense part is averaged over all ranks in every step, as ever.

Source: the 2D sparse parallelism of TorchRec (Zhang et al. 2025), whose DMPCollection averages
weights and optimizer state alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from rayrec.checkpoint import ShardState
from rayrec.comm.choose import Transport, exchange_for
from rayrec.comm.exchange import Exchange
from rayrec.comm.process_group import new_group
from rayrec.errors import ConfigError
from rayrec.shards.touched import TouchedRows

_CHUNK = 1 << 22  # values averaged at a time


class ReplicaGroups:
    """This rank's place in the grid of sharding groups x replicas; all ranks build it together.

    Args:
        group_size: S, ranks of one sharding group.
        sync_every: k; 1 keeps replicas exactly equal, more is the number of steps between two
            averages.
    Raises:
        ConfigError: the world is no multiple of S, or there is only one group.
    """

    def __init__(self, group_size: int, sync_every: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if group_size < 1 or world % group_size or world == group_size:
            raise ConfigError(
                f"sharding_group_size={group_size} does not part {world} ranks into two or more "
                f"equal groups; choose a proper divisor of {world}, or leave it out."
            )
        if sync_every < 1:
            raise ConfigError(
                f"sync_every={sync_every}; tables must be averaged every 1 or more steps."
            )
        self.sync_every, self.num_replicas, self._steps = sync_every, world // group_size, 0
        # every rank makes every group, in one order; peers are group_size apart
        firsts = range(0, world, group_size)
        groups = [new_group(list(range(first, first + group_size))) for first in firsts]
        peers = [new_group(list(range(i, world, group_size))) for i in range(group_size)]
        self.group, self._peers = groups[rank // group_size], peers[rank % group_size]

    def peers(self, device: torch.device, transport: Transport) -> Exchange | None:
        """An exchange of the ranks with the same shards, when replicas are to be exactly equal."""
        return exchange_for(self._peers, device, transport) if self.sync_every == 1 else None

    def due(self) -> bool:
        """Count one step, and return whether an average is due before the next."""
        if self.sync_every == 1:
            return False
        self._steps += 1
        return self._steps % self.sync_every == 0

    def go_on_from(self, steps: int) -> None:
        """Count on from a number of steps that were done before."""
        self._steps = steps - 1  # `due` counts before each step but the first of all

    @torch.no_grad()
    def average(self, states: Iterable[ShardState]) -> None:
        """Average rows and optimizer state of equal shards over the replicas, in place.

        Args:
            states: live shards; equal shards have the same place on all replicas.
        """
        for state in states:
            for tensor in state.tensors().values():
                for part in tensor.split(max(1, _CHUNK // max(1, tensor[:1].numel()))):
                    # the sum is float32 whatever the type of the rows
                    total = part.float().contiguous()
                    dist.all_reduce(total, group=self._peers)
                    part.copy_(total.div_(self.num_replicas))

    def average_touches(self, touched: TouchedRows) -> None:
        """After an average, count as touched what any replica has touched.

        The sum of two equal numbers halves to that number. The mean of three or more may be off by
        its rounding, so all rows count as touched there.
        """
        if self.num_replicas > 2:
            touched.touch_all()
            return
        for kernel in touched.kernels():
            dist.all_reduce(kernel.stamps, dist.ReduceOp.MAX, group=self._peers)
