"""A lookup kernel whose update is torch's: trains every sparse optimizer, on any device, with the
interface of the FBGEMM one.

Rows of equal width share one buffer. Forward is FBGEMM's pooling on CPU and one `embedding_bag` per
width elsewhere. The transpose of an `embedding_bag` is one, too: after a stable sort of the ids,
the gradient of a touched row is the (weighted) sum of the gradients of the bags that hold it. So
the backward pass sums over equal ids without an (ids, width) temporary, walks the touched rows in
blocks that fit a cache, and updates each block at once; no gradient of table size is ever made. The
order of every sum is fixed, so replicas stay equal bit for bit.

Costs a sort of the ids and a read and a write of the touched rows and of their state: for as many
ids 1.5 to 3 times FBGEMM's fused row-wise Adagrad on CPU, by the state of the optimizer
(benchmarks/lookup.py); see `lookup.make_lookup` for when it is chosen. Leaves out: rows outside of
device memory on CUDA.
"""

# B bags per slot, S slots of one width, N their ids, U touched rows, D width

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.distributed.kernels.bands import (
    Bags,
    Band,
    bag_sums,
    bands_of,
    put_rows,
    shift,
    slot_rows,
)
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.parts import Share, cut_rows, ids_per_slot
from rayrec.distributed.kernels.slot_rows import take_rows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Task, Workers
from rayrec.distributed.program.groups import LookupGroup
from rayrec.errors import ConfigError
from rayrec.optim import SparseOptimizer
from rayrec.sparse.ops import complete_cumsum, runs

# of touched rows updated at once: 512 KiB per temporary, or few launches
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}


class TorchLookup:
    """The shards of one `LookupGroup` of this rank, their optimizer state, and the operators over
    them.

    Args:
        group: what to look up.
        optimizer: the update that the backward pass applies.
        device: where rows live.
        workers: share the work on CPU; see `parts`.
        space: where the rows lie, where all ranks share them; memory of its own when None.
    Attributes:
        iteration: updates so far; Adam and its kin correct their bias by it.
    Raises:
        ConfigError: the rows shall live outside of a GPU's memory, which only FBGEMM's kernels can
            do.
    """

    def __init__(
        self,
        group: LookupGroup,
        optimizer: SparseOptimizer,
        device: torch.device,
        workers: Workers | None = None,
        space: TableSpace | None = None,
    ) -> None:
        if device.type != "cpu" and group.key.storage.kind != "device":
            tables = ", ".join(sorted({shard.table for shard in group.shards}))
            why = f"{optimizer} on {group.key.data_type.value} tables"
            why += " of widths that are no multiple of 4" if group.key.odd else ""
            raise ConfigError(
                f"FBGEMM has no CUDA kernel for {why}, so the rows of {tables} cannot have storage "
                f"{group.key.storage.label!r}. "
                "Change storage, type or width, or train without max_row_norm, with a decay that "
                "FBGEMM knows, and Adam on FP32 "
                "(docs/optimizers.md)."
            )
        self.group, self.optimizer, self.device, self.workers = (
            group,
            optimizer,
            device,
            workers or Workers(),
        )
        self.learning_rate, self.iteration = optimizer.lr, 0
        rows, self._bands = bands_of(group, optimizer, device, space)
        self._slots = (
            slot_rows(group, rows, self._bands, self.workers) if device.type == "cpu" else None
        )
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def __call__(self, routed: GroupIds) -> Tensor:
        """Pool the rows of every slot's bags.

        Returns:
            (bags, sum of slot widths) float32; its backward updates the rows.
        """
        return _Pool.apply(self, self._anchor, routed.ids, routed.offsets, routed.weights)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        self.learning_rate = lr

    def shard_states(self) -> list[ShardState]:
        """Return live views of the rows and optimizer state of every shard."""
        found = {}
        for band in self._bands:
            for shard, first in band.shards.items():
                rows = slice(first, first + len(shard.rows))
                found[shard] = ShardState(
                    shard,
                    band.weight[rows],
                    {name: state[rows] for name, state in band.state.items()},
                )
        return [found[shard] for shard in self.group.shards]

    def _pool(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: Sequence[Bags]
    ) -> Tensor:
        # (bags, sum of slot widths) float32; `bags` are the same ids band by band
        if self.group.key.sequence:  # one slot, and every id a bag of its own
            table, rows_N = self._bands[0].weight, bags[0].rows_N
            return (
                table.index_select(0, rows_N).float()
                if self._slots is None
                else take_rows(table, rows_N, self.workers)
            )
        if self._slots is not None:
            return self._slots.look_up(ids, offsets, weights)
        num_bags = (offsets.numel() - 1) // len(self.group.slots)
        pooled = torch.empty(num_bags, self.group.width, device=self.device)
        for band, b in zip(self._bands, bags, strict=True):
            part = bag_sums(band.weight, b.rows_N, b.offsets, b.weights_N).view(
                len(band.slots), num_bags, band.width
            )
            for i, column in enumerate(band.columns):
                pooled[:, column : column + band.width] = part[i]
        return pooled

    def update_in_place(self, grad: Tensor, routed: GroupIds) -> None:
        """See `GroupLookup.update_in_place`; a pooled group's `grad` has its columns alone."""
        with self.workers.alone():
            if self.group.key.sequence:
                grad = grad[
                    :, self.group.first_column : self.group.first_column + self.group.width
                ].contiguous()
            self._update_all(
                self._split(routed.ids, routed.offsets, routed.weights), self._by_band(grad)
            )

    def _update_all(self, bags: Sequence[Bags], by_band: Sequence[Tensor]) -> None:
        self.iteration += 1
        parts = zip(self._bands, bags, by_band, strict=True)
        self.workers.run(
            [
                task
                for band, b, grad_of_bags in parts
                for task in self._updates(band, b, grad_of_bags)
            ]
        )

    def _by_band(self, grad: Tensor) -> list[Tensor]:
        # per band (S * B, D) of gradients, in the order that `Bags.by_slot` tells
        limit = self.optimizer.max_gradient
        grad = grad if limit is None else grad.clamp(-limit, limit)
        return [self._grad_of_bags(band, grad) for band in self._bands]

    def _grad_of_bags(self, band: Band, grad: Tensor) -> Tensor:
        """Return (S * B, D): the gradients of one band's bags, as `Bags.grad_row_N` counts them."""
        if len(self._bands) == 1:
            return grad.view(-1, band.width)
        return torch.cat([grad[:, column : column + band.width] for column in band.columns])

    def _split(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> list[Bags]:
        """Return the bags of each band, with ids as rows of its buffer.

        Args:
            ids: (N,) of all slots, local to the shards.
            offsets: (slots * B + 1,), slot by slot.
            weights: (N,) or None.
        """
        num_bags = (offsets.numel() - 1) // len(self.group.slots)
        # (S + 1,): where the ids of each slot begin
        bounds = offsets[:: max(num_bags, 1)]
        if len(self._bands) == 1:
            return [
                self._bags(
                    self._bands[0],
                    shift(ids, self._bands[0], bounds),
                    offsets,
                    weights,
                    (slice(None),),
                )
            ]
        cuts, lengths, found = (
            bounds.tolist() if num_bags else [0] * (len(self.group.slots) + 1),
            offsets.diff(),
            [],
        )
        for band in self._bands:
            slots = runs(band.slots)
            spans = tuple(slice(cuts[run.start], cuts[run.stop]) for run in slots)
            own = complete_cumsum(
                torch.cat([lengths[run.start * num_bags : run.stop * num_bags] for run in slots])
            )
            rows_N = shift(torch.cat([ids[span] for span in spans]), band, own[:: max(num_bags, 1)])
            weights_N = None if weights is None else torch.cat([weights[span] for span in spans])
            found.append(self._bags(band, rows_N, own, weights_N, spans))
        return found

    def _bags(
        self,
        band: Band,
        rows_N: Tensor,
        offsets: Tensor,
        weights_N: Tensor | None,
        spans: tuple[slice, ...],
    ) -> Bags:
        slots = len(band.slots)
        return Bags(
            rows_N, offsets, weights_N, spans, range(slots), slots, by_slot=len(self._bands) > 1
        )

    def _grad_of_weights(
        self, bags: Sequence[Bags], grads: Sequence[Tensor], weights: Tensor
    ) -> Tensor:
        """Return (N,): per id, the row that its weight scales, times the gradient of its bag."""
        found = torch.empty_like(weights)
        for band, b, grad in zip(self._bands, bags, grads, strict=True):
            step = max(1, self._block_elements() // band.width)
            dots = weights.new_empty(b.rows_N.numel())

            def fill(
                dots: Tensor, rows: Tensor, bag: Tensor, band: Band = band, grad: Tensor = grad
            ) -> None:
                dots.copy_(torch.einsum("nd,nd->n", band.weight[rows].float(), grad[bag]))

            parts = zip(
                dots.split(step), b.rows_N.split(step), b.grad_row_N().split(step), strict=True
            )
            self.workers.run([partial(fill, *part) for part in parts])
            for span, part in zip(
                b.spans,
                dots.split([len(range(*s.indices(weights.numel()))) for s in b.spans]),
                strict=True,
            ):
                found[span] = part
        return found

    def _block_elements(self) -> int:
        return _BLOCK_ELEMENTS["cpu" if self.device.type == "cpu" else "cuda"]

    def _updates(self, band: Band, bags: Bags, grad: Tensor) -> list[Task]:
        """Return the tasks that update the band's rows; `grad` is (S * B, D)."""
        if self.workers.threads == 1:
            return [partial(self._update, band, bags, grad)]
        shards = [self.group.slot_shards[slot] for slot in band.slots]
        shares = cut_rows(
            ids_per_slot(bags.offsets, len(shards)),
            [band.width] * len(shards),
            shards,
            self.workers.threads,
        )
        return [partial(self._update_share, band, bags, grad, share) for share in shares]

    def _update_share(self, band: Band, bags: Bags, grad: Tensor, share: Share) -> None:
        self._update(band, bags.part(share), grad)

    def _update(self, band: Band, bags: Bags, grad: Tensor) -> None:
        """Sum the gradients of equal ids and update each touched row once; `grad` is (S * B, D)."""
        # A stable sort keeps equal ids in their order, so that their sum repeats bit for bit.
        sorted_N, order_N = bags.rows_N.sort(stable=True)
        bag_N = bags.grad_row_N().index_select(0, order_N)
        weights_N = None if bags.weights_N is None else bags.weights_N.index_select(0, order_N)
        touched_U, counts_U = sorted_N.unique_consecutive(return_counts=True)
        # The ids of row touched_U[u] are sorted_N[starts[u] : starts[u + 1]].
        touched_U, starts = touched_U.long(), complete_cumsum(counts_U)
        step = max(1, self._block_elements() // band.width)
        cuts = list(range(0, touched_U.numel(), step))
        heads = starts[::step].tolist() if len(cuts) > 1 else [0]
        heads = [*heads[: len(cuts)], bag_N.numel()]
        starts = starts.to(bag_N.dtype)
        for i, first in enumerate(cuts):
            rows = touched_U[first : first + step]
            ids = slice(heads[i], heads[i + 1])
            # (rows of the block, D): the lookup transposed, with rows as bags and bags as rows
            sums = bag_sums(
                grad,
                bag_N[ids],
                starts[first : first + step + 1] - heads[i],
                None if weights_N is None else weights_N[ids],
            )
            weight = band.weight.index_select(0, rows).float()
            state = {name: tensor.index_select(0, rows) for name, tensor in band.state.items()}
            self.optimizer.update_rows(self.learning_rate, self.iteration, weight, sums, state)
            put_rows(band.weight, rows, weight.to(band.weight.dtype))
            for name, tensor in state.items():
                put_rows(band.state[name], rows, tensor)


class _Pool(torch.autograd.Function):
    """The pooled lookup as a differentiable function whose backward updates the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        lookup: TorchLookup,
        anchor: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        with lookup.workers.alone():
            bags = lookup._split(ids, offsets, weights)
            ctx.lookup, ctx.bags, ctx.weights = lookup, bags, weights
            return lookup._pool(ids, offsets, None if weights is None else weights.detach(), bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lookup: TorchLookup = ctx.lookup
        with lookup.workers.alone():
            by_band = lookup._by_band(grads[0].contiguous())
            # It reads the rows, so it must come before their update.
            grad_of_weights = (
                lookup._grad_of_weights(ctx.bags, by_band, ctx.weights)
                if ctx.needs_input_grad[4]
                else None
            )
            lookup._update_all(ctx.bags, by_band)
        return None, None, None, None, grad_of_weights
