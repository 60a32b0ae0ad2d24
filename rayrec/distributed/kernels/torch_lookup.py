"""A lookup kernel whose update is torch's: trains every sparse optimizer, on any device, with the
interface of the FBGEMM one.

Rows of equal width share one buffer. Forward is FBGEMM's pooling on CPU and one `embedding_bag` per
width elsewhere. The backward pass updates the touched rows (`touched_rows`); no gradient of table
size is ever made. The order of every sum is fixed, so replicas stay equal bit for bit.

Costs a sort of the ids and a read and a write of the touched rows and of their state: for as many
ids 1.5 to 3 times FBGEMM's fused row-wise Adagrad on CPU, by the state of the optimizer
(benchmarks/lookup.py); see `lookup.make_lookup` for when it is chosen. Leaves out: rows outside of
device memory on CUDA.
"""

# B bags per slot, S slots of one width, N their ids, U touched rows, D width

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm.pages import Allocate, private_memory
from rayrec.distributed.kernels.bands import BandBags, bag_sums, bands_of, shift, slot_rows
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.slot_rows import take_rows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.touched_rows import Update, grad_of_weights, update_tasks
from rayrec.distributed.kernels.workers import Task, Workers
from rayrec.distributed.program.groups import LookupGroup
from rayrec.errors import ConfigError
from rayrec.sparse.ops import complete_cumsum, runs


class TorchLookup:
    """The shards of one `LookupGroup` of this rank, their optimizer state, and the operators over
    them.

    Args:
        group: slots and shards to look up; its key names the optimizer.
        device: device of the rows.
        workers: threads that share the work on CPU; see `parts`.
        space: memory of rows that all ranks share; memory of its own when None.
        allocate: returns memory of so many bytes on the CPU.
    Attributes:
        iteration: updates so far; Adam and its kin correct their bias by it.
    Raises:
        ConfigError: the rows shall live outside of a GPU's memory, which only FBGEMM's kernels can
            do.
    """

    def __init__(
        self,
        group: LookupGroup,
        device: torch.device,
        workers: Workers | None = None,
        space: TableSpace | None = None,
        allocate: Allocate = private_memory,
    ) -> None:
        optimizer = group.key.optimizer
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
        self.group, self.optimizer, self.device = group, optimizer, device
        self.workers = workers or Workers()
        self.learning_rate, self.iteration = optimizer.lr, 0
        self.base_rate: float | None = None
        rows, self._bands = bands_of(group, device, space, allocate)
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
                optimizer = {name: state[rows] for name, state in band.state.items()}
                found[shard] = ShardState(shard, band.weight[rows], optimizer)
        return [found[shard] for shard in self.group.shards]

    def _pool(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: Sequence[BandBags]
    ) -> Tensor:
        # (bags, sum of slot widths) float32; `bags` are the same ids band by band
        # one slot, and every id a bag of its own, unless ids of a dynamic table have no row
        if self.group.key.sequence and ids.numel() == offsets.numel() - 1:
            table, rows_N = self._bands[0].weight, bags[0].rows_N
            if self._slots is None:
                return table.index_select(0, rows_N).float()
            return take_rows(table, rows_N, self.workers)
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
        """Update rows that all ranks read; a pooled group's `grad` has its columns alone."""
        with self.workers.alone():
            if self.group.key.sequence:
                first = self.group.gradient.first
                grad = grad[:, first : first + self.group.width].contiguous()
            self._update_all(
                self._split(routed.ids, routed.offsets, routed.weights), self._by_band(grad)
            )

    def _update_all(self, bags: Sequence[BandBags], by_band: Sequence[Tensor]) -> None:
        self.iteration += 1
        update = Update(self.optimizer, self.learning_rate, self.iteration)
        tasks: list[Task] = []
        for band, b, grad in zip(self._bands, bags, by_band, strict=True):
            shards = [self.group.slot_shards[slot] for slot in band.slots]
            tasks += update_tasks(band, b, grad, update, shards, self.workers.threads)
        self.workers.run(tasks)

    def _by_band(self, grad: Tensor) -> list[Tensor]:
        # per band (S * B, D) of gradients, in the order that `BandBags.by_slot` tells
        limit = self.optimizer.max_gradient
        grad = grad if limit is None else grad.clamp(-limit, limit)
        if len(self._bands) == 1:
            return [grad.view(-1, self._bands[0].width)]
        found = []
        for band in self._bands:
            parts = [grad[:, column : column + band.width] for column in band.columns]
            found.append(torch.cat(parts))
        return found

    def _split(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> list[BandBags]:
        """Return the bags of each band, with ids as rows of its buffer.

        Args:
            ids: (N,) of all slots, local to the shards.
            offsets: (slots * B + 1,), slot by slot.
            weights: (N,) or None.
        """
        num_bags = (offsets.numel() - 1) // len(self.group.slots)
        # every `each`-th offset is where the ids of a slot begin
        each, found, whole = max(num_bags, 1), [], range(len(self.group.slots))
        if len(self._bands) == 1:
            rows_N = shift(ids, self._bands[0], offsets[::each])
            everything = (slice(None),)
            return [
                BandBags(rows_N, offsets, weights, everything, whole, len(whole), by_slot=False)
            ]
        cuts = offsets[::each].tolist() if num_bags else [0] * (len(whole) + 1)
        lengths = offsets.diff()
        for band in self._bands:
            slots, count = runs(band.slots), len(band.slots)
            spans = tuple(slice(cuts[run.start], cuts[run.stop]) for run in slots)
            own = complete_cumsum(
                torch.cat([lengths[run.start * num_bags : run.stop * num_bags] for run in slots])
            )
            rows_N = shift(torch.cat([ids[span] for span in spans]), band, own[::each])
            weights_N = None if weights is None else torch.cat([weights[span] for span in spans])
            found.append(BandBags(rows_N, own, weights_N, spans, range(count), count, by_slot=True))
        return found


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
            of_weights = None
            if ctx.needs_input_grad[4]:
                of_weights = grad_of_weights(
                    lookup._bands, ctx.bags, by_band, ctx.weights, lookup.workers
                )
            lookup._update_all(ctx.bags, by_band)
        return None, None, None, None, of_weights
