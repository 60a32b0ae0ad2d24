"""The gradients of per-id weights that a model learns go to the rank that read the ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rayrec.distributed.program.slots import Sizes
from rayrec.distributed.ways import matrices
from rayrec.distributed.ways.way import Step

if TYPE_CHECKING:
    from rayrec.distributed.ways.message_leg import MessageLeg


class RouteWeights(torch.autograd.Function):
    """Weights as the owners see them: an anchor, then one tensor per weighted group."""

    @staticmethod
    def forward(ctx: Any, leg: MessageLeg, step: Step, weights: Tensor) -> tuple[Tensor, ...]:
        """Tie the values to the graph; they have travelled with the ids."""
        ctx.leg, ctx.step, ctx.like = leg, step, weights
        of_groups = [step.routed.groups[group.key].weights for group in leg.weighted]
        return weights.new_empty(0), *(w for w in of_groups if w is not None)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradient of every weight to the rank that read its id."""
        leg, step, rank = ctx.leg, ctx.step, ctx.step.exchange.rank
        sent, got = step.routed.sent, step.routed.got
        sums: list[dict[int, Tensor]] = [{} for _ in got]  # [source][piece]
        for group, grad in zip(leg.weighted, grads, strict=True):
            # (N,) gradients come slot by slot, and within a slot source by source.
            counts = [sizes.ids[slot.piece] for slot in group.slots for sizes in got]
            parts = iter(grad.split(counts))
            for slot in group.slots:
                for source, of_source in enumerate(sums):
                    part = next(parts)
                    if group.key.carrier == matrices.REPLICAS and source != rank:
                        # every replica computes it; the one on the source's own rank counts
                        part = torch.zeros_like(part)
                    # All slots of a piece read the same weights, so their gradients add up.
                    before = of_source.get(slot.piece)
                    of_source[slot.piece] = part if before is None else before + part
        back = [of_source[piece] for of_source in sums for piece in sorted(of_source)]
        send = torch.cat(back) if back else ctx.like.new_empty(0)
        received = step.exchange.all_to_all(
            send.contiguous(),
            [_ids(leg.weighted_pieces[rank], sizes) for sizes in got],
            [_ids(pieces, sizes) for pieces, sizes in zip(leg.weighted_pieces, sent, strict=True)],
        ).wait()
        total = torch.zeros_like(ctx.like)
        at = 0
        for owner, (message, sizes) in enumerate(zip(step.send.messages, sent, strict=True)):
            for piece, (row, count) in enumerate(zip(message.rows, sizes.ids, strict=True)):
                if piece not in leg.weighted_pieces[owner]:
                    continue
                part, ids = step.routed.source.place_of(row)
                grad, at = received[at : at + count], at + count
                if part.origin is None:
                    total[ids] += grad
                else:
                    total.index_add_(0, part.origin[ids], grad.to(total.dtype))
        # `MessageLeg.reverse` has divided by the number of ranks, as only the tables' part wants it
        groups = 1 if step.peers is None else step.peers.world_size
        return None, None, total.mul_(len(got) * groups)


def _ids(pieces: frozenset[int], sizes: Sizes) -> int:
    return sum(sizes.ids[piece] for piece in pieces)
