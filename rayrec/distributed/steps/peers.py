"""Exact replicas: equal shards in several sharding groups make the same updates, because each sees
the ids and gradients of all.

Before the lookup, the ranks that hold replicas of the same shards hand each other the ids they were
sent; the kernel then reads the bags of all groups, and only the rows of this group's bags go on. In
the backward pass they hand each other the gradients, so every replica's update is that of one
world, with any optimizer, and replicas stay equal bit for bit. Costs a lookup of all groups' bags
and, per kernel, two collectives more in the forward pass and one in the backward pass. Evaluation
hands nothing over.
"""

# R replicas, S slots of a group, N ids, D columns

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.ids import GroupIds, bag_offsets
from rayrec.sparse.ops import offsets_of


def look_up_with_peers(lookup: GroupLookup, own: GroupIds, peers: Exchange) -> Tensor:
    """Look up the bags of all groups, and return the rows of this group's own.

    The backward pass updates rows by the gradients of all groups.

    Args:
        own: ids that this group's ranks were sent for the kernel.
        peers: the ranks that hold replicas of the same shards.
    Returns:
        (bags of this group, D) float32, or (ids of this group, width) of a sequence.
    """
    slots = 1 if lookup.group.key.sequence else len(lookup.group.slots)
    lengths = own.offsets.diff()
    numbers = torch.tensor([lengths.numel(), own.ids.numel(), *own.parts], device=own.ids.device)
    # all groups have one plan, and so as many parts
    counts = [one.tolist() for one in _gather(numbers, peers, [len(numbers)] * peers.world_size)]
    sizes = [ids for _, ids, *_ in counts]
    ids = _gather(own.ids, peers, sizes)
    bags = _gather(lengths, peers, [n for n, *_ in counts])
    weights, lags = None, None
    if own.weights is not None:
        weights = _gather(own.weights.detach(), peers, sizes)
        weights[peers.rank] = own.weights  # in the graph, where they are learned
    if own.lags is not None:
        lags = _gather(own.lags.to(own.ids.device), peers, sizes)
    per_slot = [part.view(slots, -1) for part in bags]  # [replica] (S, bags)
    cuts = [offsets_of(part.sum(1).tolist()) for part in per_slot]
    # Slot by slot, and within a slot replica by replica, as one world would send them.
    order = [
        (s, r, slice(cuts[r][s], cuts[r][s + 1]))
        for s in range(slots)
        for r in range(peers.world_size)
    ]
    merged_lengths = torch.cat([per_slot[r][s] for s, r, _ in order])

    def merge(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([values[r][span] for _, r, span in order])

    parts = [span.stop - span.start for _, _, span in order]
    if lookup.group.key.sequence:  # rank by rank, as they are
        parts = [part for _, _, *of_replica in counts for part in of_replica]
    merged = GroupIds(
        ids=merge(ids),
        offsets=bag_offsets(merged_lengths),
        weights=None if weights is None else merge(weights),
        lags=None if lags is None else merge(lags),
        parts=tuple(parts),
    )
    return _OwnRows.apply(lookup(merged), peers, [part.shape[1] for part in per_slot])


def _gather(values: Tensor, peers: Exchange, sizes: Sequence[int]) -> list[Tensor]:
    """Return every replica's values, in replica order."""
    # The exchange lends what it brings only until its next collective.
    return [part.clone() for part in peers.all_gather(values, sizes).wait()]


class _OwnRows(torch.autograd.Function):
    """This group's rows of the rows of all groups; its backward hands every replica the gradients
    of all.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: Exchange, bags: list[int]) -> Tensor:
        """Cut (bags of all groups, D) to (bags of this group, D)."""
        ctx.peers, ctx.bags = peers, bags
        first = sum(bags[: peers.rank])
        return rows[first : first + bags[peers.rank]].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gather (bags of all groups, D) from each group's, divided by the number of groups.

        Each group has divided its gradients by its own ranks; together this is the mean over all.
        """
        width = grad.shape[1]
        parts = _gather(grad.contiguous().view(-1), ctx.peers, [n * width for n in ctx.bags])
        return torch.cat(parts).view(-1, width) / ctx.peers.world_size, None, None
