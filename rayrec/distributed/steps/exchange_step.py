"""The two collectives of a step that gradients flow through, as autograd functions.

`Combine` sends looked-up rows home and gradients back to the owners; `RouteWeights` sends the
gradients of per-id weights, where a model learns them, back to the rank that read the ids.
Gradients arrive summed over ranks, while dense gradients are averaged by DDP: the one division by
the number of ranks is in `Combine.backward`, and `RouteWeights` takes it back, since the weights
belong to the dense part.

Every rank calls both in every step, also one without slots: all must enter the collectives of the
backward pass, so an anchor tensor keeps them in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.codec import Codec, Codecs, Sections, coded_all_to_all
from rayrec.comm.exchange import Exchange
from rayrec.distributed.program.slots import RankSlots, Sizes
from rayrec.distributed.program.spans import CombinePlan
from rayrec.distributed.steps.combine import (
    arrive,
    join_pooled,
    join_sequence,
    join_varying,
    pack_rows,
)
from rayrec.distributed.steps.compact import Places, join_compact
from rayrec.distributed.steps.gradients import HomeGrads, pack_grads, pack_hop_grads, split_grads
from rayrec.distributed.steps.route import RoutedIds, SendPlan
from rayrec.distributed.steps.two_hop import Hops, HopSizes, send_back, send_home


@dataclass(frozen=True)
class Step:
    """What both directions of one step need.

    Attributes:
        bags: feature -> bags, when they differ by feature; empty when all have the same.
        hops: the exchanges of the two-hop route, where any table takes it.
        replicas: sharding groups that make the same updates, each with the gradients of all.
        places: owner and matrix -> where its rows belong, where bags without ids stayed at home.
    """

    plan: CombinePlan
    send: SendPlan
    routed: RoutedIds
    exchange: Exchange
    codecs: Codecs
    bags: Mapping[str, int]
    hops: Hops | None
    replicas: int
    places: Mapping[tuple[int, int], Places]

    @property
    def mine(self) -> RankSlots:
        """The slots of this rank."""
        return self.plan.slots.ranks[self.plan.rank]

    def apart(self, codec: Codec | None) -> int | None:
        """This rank, where its message to itself stays out of the exchange; a codec must see it, so
        that replicas get equal values.
        """
        return self.plan.rank if codec is None and self.exchange.keeps_own else None

    def by_use(self, collection: int) -> bool:
        """Whether a collection's output is one tensor per use instead of one matrix."""
        return bool(self.bags) or self.plan.slots.collections[collection].sequence


def _swap(
    step: Step,
    codec: Codec | None,
    send: Tensor,
    kept: Tensor | None,
    out: Sections,
    into: Sections,
) -> list[Tensor]:
    """What arrived from every rank, with the message that this rank kept in its place."""
    if kept is None:
        return coded_all_to_all(step.exchange, codec, send, out, into)
    rank = step.plan.rank
    splits_out, splits_in = (
        [0 if r == rank else sum(part) for r, part in enumerate(sections)]
        for sections in (out, into)
    )
    received = step.exchange.views(send, splits_out, splits_in).wait()
    received[rank] = kept
    return received


class Combine(torch.autograd.Function):
    """The output exchange. Inputs are the kernels' outputs, outputs per collection one (B, D)
    matrix, or one tensor per use.
    """

    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Send rows home; see `combine`."""
        ctx.step = step
        plan, routed, ranks = step.plan, step.routed, step.plan.slots.ranks
        out_sizes = [[step.mine.rows_out(sizes)] for sizes in routed.got]
        in_sizes = [
            [owner.rows_out(sizes)] for owner, sizes in zip(ranks, routed.sent, strict=True)
        ]
        own = step.apart(step.codecs.forward)
        send, kept = pack_rows(step.mine, rows, routed.got, step.exchange, own, anchor.device)
        received = _swap(step, step.codecs.forward, send, kept, out_sizes, in_sizes)
        hops: list[Tensor] = []
        if step.hops is not None:
            summed = [
                r for group, r in zip(step.mine.exchanged, rows, strict=True) if group.key.two_hop
            ]
            sizes = HopSizes.of(plan.slots, plan.rank, routed)
            hops = send_home(step.hops, sizes, summed, step.codecs.forward, anchor.device)
        arrived = arrive(plan, routed, received, rows, hops)
        outputs: list[Tensor] = []
        for collection in plan.slots.exchanged:
            if plan.slots.collections[collection].sequence:
                outputs.extend(join_sequence(plan, routed, step.send, arrived, collection))
            elif step.bags:
                outputs.extend(join_varying(plan, arrived, collection, step.bags))
            elif any(place.collection == collection for place in step.places.values()):
                outputs.append(join_compact(plan, arrived, collection, step.places, routed))
            else:
                outputs.append(join_pooled(plan, arrived, collection))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send gradients to the owners."""
        step: Step = ctx.step
        slots, routed = step.plan.slots, step.routed
        pooled: dict[int, Tensor] = {}
        uses: dict[tuple[int, int], Tensor] = {}
        flow = iter(grads)
        for collection in slots.exchanged:
            if step.by_use(collection):
                uses.update({(collection, use.index): next(flow) for use in slots.uses[collection]})
            else:
                pooled[collection] = (
                    next(flow).contiguous()
                    if any(map(any, step.plan.cuts)) or step.places
                    else next(flow)
                )
        home = HomeGrads(pooled, uses, step.bags)
        # the one division by the number of ranks
        codec, scale = step.codecs.backward, 1.0 / len(routed.got)
        early = scale if codec is None else 1.0  # before the wire, unless it would lose bits there
        packed = pack_grads(
            step.plan,
            routed,
            step.send,
            home,
            grads[0],
            step.exchange,
            step.apart(codec),
            early,
            step.places,
        )
        out_sizes = [
            owner.grads_in(sizes) for owner, sizes in zip(slots.ranks, routed.sent, strict=True)
        ]
        in_sizes = [step.mine.grads_in(sizes) for sizes in routed.got]
        received = _swap(step, codec, packed.flat, packed.kept, out_sizes, in_sizes)
        found = split_grads(step.mine, received, routed.got, scale / early, packed.matrix)
        if step.hops is not None:
            sizes = HopSizes.of(slots, step.plan.rank, routed)
            back = pack_hop_grads(step.plan, sizes.home, home, grads[0])
            summed = send_back(step.hops, sizes, back, step.codecs.backward)
            found += summed.mul_(scale).split([g.width for g in step.mine.hop.groups], 1)
        order = (*step.mine.pooled, *step.mine.sequences, *step.mine.hop.groups)
        by_key = {group.key: grad for group, grad in zip(order, found, strict=True)}
        return None, grads[0].new_empty(0), *(by_key[group.key] for group in step.mine.exchanged)


class RouteWeights(torch.autograd.Function):
    """Per-id weights as the owners see them, differentiable. Outputs: an anchor, then one tensor
    per weighted group of this rank.
    """

    @staticmethod
    def forward(ctx: Any, step: Step, weights: Tensor) -> tuple[Tensor, ...]:
        """The values travelled with the ids; this only ties them to the graph."""
        ctx.step, ctx.like = step, weights
        groups = [g for g in step.mine.exchanged if g.key.weighted]
        found = [step.routed.groups[g.key].weights for g in groups]
        return weights.new_empty(0), *(w for w in found if w is not None)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradient of every weight to the rank that read its id."""
        step: Step = ctx.step
        ranks, routed = step.plan.slots.ranks, step.routed
        sums: list[dict[int, Tensor]] = [{} for _ in routed.got]  # [source][piece]
        for group, grad in zip(
            (g for g in step.mine.exchanged if g.key.weighted), grads, strict=True
        ):
            counts = [sizes.ids[slot.piece] for slot in group.slots for sizes in routed.got]
            parts = iter(grad.split(counts))
            for slot in group.slots:
                for source, found in enumerate(sums):
                    part = next(parts)
                    if group.key.replicated and source != step.plan.rank:
                        # every replica computes it; that of the source's own rank counts
                        part = torch.zeros_like(part)
                    found[slot.piece] = found[slot.piece] + part if slot.piece in found else part
        back = [found[i] for found in sums for i in sorted(found)]
        send = torch.cat(back) if back else ctx.like.new_empty(0)
        received = step.exchange.all_to_all(
            send.contiguous(),
            [_weighted_ids(step.mine, sizes) for sizes in routed.got],
            [_weighted_ids(owner, sizes) for owner, sizes in zip(ranks, routed.sent, strict=True)],
        ).wait()
        total = torch.zeros_like(ctx.like)
        at = 0
        for owner, (message, sizes) in enumerate(zip(step.send.messages, routed.sent, strict=True)):
            for piece, (row, count) in enumerate(zip(message.rows, sizes.ids, strict=True)):
                if piece in ranks[owner].weighted_pieces:
                    _add_home(total, step, row, received[at : at + count])
                    at += count
        return None, total.mul_(len(ranks) * step.replicas)


def _weighted_ids(rank: RankSlots, sizes: Sizes) -> int:
    return sum(sizes.ids[piece] for piece in rank.weighted_pieces)


def _add_home(total: Tensor, step: Step, row: int, grad: Tensor) -> None:
    for part in step.routed.source.parts:
        if row < len(part.counts):
            start = sum(part.counts[:row])
            span = slice(start, start + part.counts[row])
            if part.origin is None:
                total[span] += grad
            else:
                total.index_add_(0, part.origin[span], grad.to(total.dtype))
            return
        row -= len(part.counts)
