"""Tables in memory that all ranks share are read in place: rows do not travel, gradients travel
once.

Every rank looks up its own batch in all tables of a collection by one kernel, whoever owns them,
straight into the output. In the backward pass it writes the gradient of that output, scaled, into
memory that all ranks read, once; after one wait every owner updates its rows from there, with the
ids that it was sent in the input exchange. So all plans cost the same at home, a bag's sum is that
of the unsharded table whatever cuts its rows, and a step waits twice: for ids, when all have
updated the rows of the step before, and for gradients, when all have read those of this one.

For CPU ranks of one host; see `EngineOptions.share_tables`.
"""

# B rows of the home batch, D columns of a collection

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.comm.pages import make_huge
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.program.slots import Sizes, SlotTable, by_collection
from rayrec.distributed.shared.home_lookup import Home, fill
from rayrec.distributed.steps.route import RoutedIds
from rayrec.observe.timer import StepTimer, span

_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class InPlaceStep:
    """What both directions of one step need.

    Attributes:
        homes: the collections that are read in place.
        updates: this rank's shards of each collection.
        bags: feature -> bags, when they differ by feature; empty when all have the same.
        gradients: where they are handed over.
    """

    slots: SlotTable
    homes: Mapping[int, Home]
    updates: Sequence[GroupLookup]
    keys: tuple[str, ...]
    routed: RoutedIds
    bags: Mapping[str, int]
    exchange: Exchange
    gradients: SharedGradients
    timer: StepTimer | None

    @property
    def counts(self) -> dict[int, int]:
        """Tensors that each collection gives."""
        return self.slots.outputs(self.homes, bool(self.bags))

    def rows_of(self, collection: int, sizes: Sizes) -> int:
        """Rows of the gradient of a collection that one rank hands over."""
        return sum(sizes.extents[self.slots.extents[collection]])


class SharedGradients:
    """Memory for the gradients of one step of all ranks, which grows to the largest and is used
    again.

    Attributes:
        free: whether every rank has read those of the last step.
    """

    def __init__(self) -> None:
        self.free = True
        self._memory = torch.empty(0)

    def matrices(self, shapes: Sequence[tuple[int, int]], exchange: Exchange) -> list[Tensor]:
        """One of each shape, for all ranks; contents are those of a former step. All ranks call it
        together.
        """
        sizes = [rows * width for rows, width in shapes]
        if self._memory.numel() < sum(sizes):
            memory = exchange.share(max(_LEAST_BYTES, 1 << (4 * sum(sizes) - 1).bit_length()))
            assert memory is not None, "tables are shared"
            if exchange.rank == 0:
                make_huge(memory)
            self._memory = memory.view(torch.float32)
        return [
            part.view(shape)
            for part, shape in zip(self._memory[: sum(sizes)].split(sizes), shapes, strict=True)
        ]


class ReadInPlace(torch.autograd.Function):
    """Rows of all collections that are read in place. Per pooled collection one (B, D) matrix, or
    where keys have different numbers of bags one (bags, width) per use; per sequence (ids, D) per
    use. `weights` are those of the KJT, for their gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, step: InPlaceStep, anchor: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Look up the batch of this rank."""
        ctx.step, ctx.found, ctx.like = step, {}, weights
        outputs: list[Tensor] = []
        for collection, home in step.homes.items():
            with span(step.timer, "input"):
                wanted = ctx.found[collection] = home.wanted(step.routed.source, step.keys)
            with span(step.timer, "lookup"):
                outputs += home.look_up(wanted, step.bags)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Hand over the gradients of this rank's outputs and update its rows with those of all
        ranks.
        """
        step: InPlaceStep = ctx.step
        mine, of_weights = by_collection(grads, step.counts), None
        with span(step.timer, "gradient"):
            if ctx.needs_input_grad[2]:  # before any row changes
                of_weights = torch.zeros_like(ctx.like)
                for collection, home in step.homes.items():
                    if home.weighted:
                        home.grad_of_weights(
                            mine[collection],
                            ctx.found[collection],
                            step.routed.source,
                            step.keys,
                            of_weights,
                        )
            whole = _hand_over(step, mine)
        with span(step.timer, "update"):
            for lookup in step.updates:
                lookup.update_in_place(
                    whole[lookup.group.key.collection], step.routed.groups[lookup.group.key]
                )
        step.gradients.free = False
        return None, grads[0].new_empty(0), of_weights


def _hand_over(step: InPlaceStep, mine: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
    """Per collection the gradients of all ranks, divided by their number; the one wait of the
    backward pass.
    """
    exchange, most_bags = step.exchange, step.routed.source.most_bags
    rows = {c: [step.rows_of(c, sizes) for sizes in step.routed.got] for c in step.homes}
    shapes = [(sum(rows[c]), home.width) for c, home in step.homes.items()]
    if exchange.world_size == 1:
        return {
            c: _alone(home, mine[c], shape, most_bags)
            for (c, home), shape in zip(step.homes.items(), shapes, strict=True)
        }
    if not step.gradients.free:
        exchange.meet()
    whole = dict(zip(step.homes, step.gradients.matrices(shapes, exchange), strict=True))
    for c, home in step.homes.items():
        first = sum(rows[c][: exchange.rank])
        own = whole[c][first : first + rows[c][exchange.rank]]
        fill(own, home.joined(mine[c], most_bags), 1.0 / exchange.world_size)
    exchange.meet()
    return whole


def _alone(home: Home, grads: Sequence[Tensor], shape: tuple[int, int], most_bags: int) -> Tensor:
    if len(grads) == 1 and grads[0].shape == shape:
        return grads[0].contiguous()
    whole = grads[0].new_empty(shape)
    fill(whole, home.joined(grads, most_bags), 1.0)
    return whole
