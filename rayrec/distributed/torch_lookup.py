"""A lookup kernel in plain torch: trains every sparse optimizer, on any device, with the interface of the FBGEMM one.

Rows of equal width share one buffer, so that slots of many tables are one `embedding_bag`. Its transpose is an `embedding_bag`, too: after
a stable sort of the ids, the gradient of a touched row is the (weighted) sum of the gradients of the bags that hold it. So the backward
pass sums over equal ids without an (ids, width) temporary, walks the touched rows in blocks that fit a cache, and updates each block at
once; no gradient of table size is ever made. The order of every sum is fixed, so replicas stay equal bit for bit.

Costs a sort of the ids and about twice FBGEMM's fused CPU backward; see `lookup.make_lookup` for when it is chosen. Leaves out: rows
outside of device memory on CUDA.
"""

# B bags per slot, S slots of one width, N their ids, U touched rows, D width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.checkpoint import ShardState
from rayrec.distributed.route import GroupIds
from rayrec.distributed.row_update import update_rows
from rayrec.distributed.slots import LookupGroup
from rayrec.errors import ConfigError
from rayrec.layout import DataType, Shard
from rayrec.optim import SparseOptimizer
from rayrec.sparse.ops import offsets_of, runs

_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # of touched rows updated at once: 1 MiB per temporary, or few launches


@dataclass(frozen=True)
class _Band:
    """The slots of one width and their shards, rows below each other in one buffer.

    Attributes:
        weight: (rows, D) in the storage type.
        state: per state name (rows,) or (rows, D) float32.
        shards: each shard with its first row in the buffer.
        slots: indices of the group's slots, ascending.
        columns: first output column of each slot.
        first_rows: (S,) int64, the first buffer row of each slot's shard.
    """

    weight: Tensor
    state: dict[str, Tensor]
    shards: dict[Shard, int]
    slots: tuple[int, ...]
    columns: tuple[int, ...]
    first_rows: Tensor

    @property
    def width(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True)
class _Bags:
    """What one band reads in one step.

    Attributes:
        rows_N: rows of the band's buffer.
        offsets: (S * B + 1,).
        weights_N: weight of each id, or None.
        spans: where these ids lie among those of the group.
    """

    rows_N: Tensor
    offsets: Tensor
    weights_N: Tensor | None
    spans: tuple[slice, ...]

    def bag_N(self) -> Tensor:
        """The bag of each id."""
        num_bags = self.offsets.numel() - 1
        return torch.arange(num_bags, device=self.offsets.device).repeat_interleave(self.offsets.diff(), output_size=self.rows_N.numel())


class TorchLookup:
    """The shards of one `LookupGroup` of this rank, their optimizer state, and the operators over them.

    Args:
        group: what to look up.
        optimizer: the update that the backward pass applies.
        device: where rows live.
    Attributes:
        iteration: updates so far; Adam and its kin correct their bias by it.
    Raises:
        ConfigError: the rows shall live outside of a GPU's memory, which only FBGEMM's kernels can do.
    """

    def __init__(self, group: LookupGroup, optimizer: SparseOptimizer, device: torch.device) -> None:
        if device.type != "cpu" and group.key.storage != "device":
            tables = ", ".join(sorted({shard.table for shard in group.shards}))
            raise ConfigError(
                f"FBGEMM has no CUDA kernel for {optimizer}, so the rows of {tables} cannot have storage {group.key.storage!r}. "
                "Change the storage, or train without max_row_norm and with the decay that FBGEMM knows (docs/optimizers.md)."
            )
        self.group, self.optimizer, self.device = group, optimizer, device
        self.learning_rate, self.iteration = optimizer.lr, 0
        self._bands = _bands(group, optimizer, device)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def __call__(self, routed: GroupIds) -> Tensor:
        """Pool the rows of every slot's bags.

        Returns:
            (bags, sum of slot widths) float32; its backward updates the rows.
        """
        return _Pool.apply(self, self._anchor, routed.ids, routed.offsets, routed.weights)

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of the updates to come."""
        self.learning_rate = lr

    def shard_states(self) -> list[ShardState]:
        """Live views of the rows and optimizer state of every shard."""
        found = {}
        for band in self._bands:
            for shard, first in band.shards.items():
                rows = slice(first, first + len(shard.rows))
                found[shard] = ShardState(shard, band.weight[rows], {name: state[rows] for name, state in band.state.items()})
        return [found[shard] for shard in self.group.shards]

    def _pool(self, bags: Sequence[_Bags], num_bags: int) -> Tensor:
        if self.group.key.sequence:  # one slot, and every id a bag of its own
            return self._bands[0].weight.index_select(0, bags[0].rows_N).float()
        parts = [
            _bag_sums(band.weight, b.rows_N, b.offsets, b.weights_N).view(len(band.slots), num_bags, band.width).transpose(0, 1)
            for band, b in zip(self._bands, bags, strict=True)
        ]
        if len(parts) == 1:
            return parts[0].reshape(num_bags, self.group.width)
        pooled = torch.empty(num_bags, self.group.width, device=self.device)
        for band, part in zip(self._bands, parts, strict=True):
            for i, column in enumerate(band.columns):
                pooled[:, column : column + band.width] = part[:, i]
        return pooled

    def _grad_of_bags(self, band: _Band, grad: Tensor) -> Tensor:
        """(S * B, D): the gradients of one band's bags below each other."""
        num_bags = grad.shape[0]
        if len(self._bands) == 1:
            by_slot = grad.view(num_bags, len(band.slots), band.width).transpose(0, 1)
            return by_slot.reshape(-1, band.width)
        return torch.cat([grad[:, column : column + band.width] for column in band.columns])

    def _split(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> list[_Bags]:
        """The bags of each band, with ids as rows of its buffer."""
        num_bags = (offsets.numel() - 1) // len(self.group.slots)
        bounds = offsets[:: max(num_bags, 1)]
        if len(self._bands) == 1:
            return [_Bags(_shift(ids, self._bands[0].first_rows, bounds), offsets, weights, (slice(None),))]
        cuts, lengths, found = bounds.tolist() if num_bags else [0] * (len(self.group.slots) + 1), offsets.diff(), []
        for band in self._bands:
            slots = runs(band.slots)
            spans = tuple(slice(cuts[run.start], cuts[run.stop]) for run in slots)
            own = _complete_sum(torch.cat([lengths[run.start * num_bags : run.stop * num_bags] for run in slots]))
            rows_N = _shift(torch.cat([ids[span] for span in spans]), band.first_rows, own[:: max(num_bags, 1)])
            weights_N = None if weights is None else torch.cat([weights[span] for span in spans])
            found.append(_Bags(rows_N, own, weights_N, spans))
        return found

    def _grad_of_weights(self, bags: Sequence[_Bags], grads: Sequence[Tensor], weights: Tensor) -> Tensor:
        """(N,): what each id's weight scales, its row, times the gradient of its bag."""
        found = torch.empty_like(weights)
        for band, b, grad in zip(self._bands, bags, grads, strict=True):
            step = max(1, self._block_elements() // band.width)
            parts = zip(b.rows_N.split(step), b.bag_N().split(step), strict=True)
            dots = torch.cat([torch.einsum("nd,nd->n", band.weight[rows].float(), grad[bag]) for rows, bag in parts])
            for span, part in zip(b.spans, dots.split([len(range(*s.indices(weights.numel()))) for s in b.spans]), strict=True):
                found[span] = part
        return found

    def _block_elements(self) -> int:
        return _BLOCK_ELEMENTS["cpu" if self.device.type == "cpu" else "cuda"]

    def _update(self, band: _Band, bags: _Bags, grad: Tensor) -> None:
        """Sum the gradients of equal ids and update each touched row once; `grad` is (S * B, D)."""
        order_N = bags.rows_N.argsort(stable=True)
        bag_N = bags.bag_N()[order_N]
        weights_N = None if bags.weights_N is None else bags.weights_N[order_N]
        touched_U, counts_U = bags.rows_N[order_N].unique_consecutive(return_counts=True)
        starts = _complete_sum(counts_U)
        step = max(1, self._block_elements() // band.width)
        cuts = list(range(0, touched_U.numel(), step))
        heads = starts[::step].tolist() if len(cuts) > 1 else [0]
        heads = [*heads[: len(cuts)], bag_N.numel()]
        for i, first in enumerate(cuts):
            rows = touched_U[first : first + step]
            ids = slice(heads[i], heads[i + 1])
            sums = _bag_sums(grad, bag_N[ids], starts[first : first + step + 1] - heads[i], None if weights_N is None else weights_N[ids])
            weight = band.weight.index_select(0, rows).float()
            state = {name: tensor.index_select(0, rows) for name, tensor in band.state.items()}
            update_rows(self.optimizer, self.learning_rate, self.iteration, weight, sums, state)
            band.weight.index_copy_(0, rows, weight.to(band.weight.dtype))
            for name, tensor in state.items():
                band.state[name].index_copy_(0, rows, tensor)


class _Pool(torch.autograd.Function):
    """The pooled lookup as a differentiable function whose backward updates the rows."""

    @staticmethod
    def forward(ctx: Any, lookup: TorchLookup, anchor: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        bags = lookup._split(ids, offsets, weights)
        ctx.lookup, ctx.bags, ctx.weights = lookup, bags, weights
        return lookup._pool(bags, (offsets.numel() - 1) // len(lookup.group.slots))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lookup: TorchLookup = ctx.lookup
        grad = grads[0].contiguous()
        if lookup.optimizer.max_gradient is not None:
            grad = grad.clamp(-lookup.optimizer.max_gradient, lookup.optimizer.max_gradient)
        by_band = [lookup._grad_of_bags(band, grad) for band in lookup._bands]
        grad_of_weights = lookup._grad_of_weights(ctx.bags, by_band, ctx.weights) if ctx.needs_input_grad[4] else None
        lookup.iteration += 1
        for band, bags, grad_of_bags in zip(lookup._bands, ctx.bags, by_band, strict=True):
            lookup._update(band, bags, grad_of_bags)
        return None, None, None, None, grad_of_weights


def _bands(group: LookupGroup, optimizer: SparseOptimizer, device: torch.device) -> list[_Band]:
    widths = [slot.width for slot in group.slots]
    columns = offsets_of(widths)
    dtype = {DataType.FP32: torch.float32, DataType.FP16: torch.float16}[group.key.data_type]
    bands = []
    for width in dict.fromkeys(widths):
        shards, rows = {}, 0
        for shard in group.shards:
            if shard.shape[1] == width:
                shards[shard] = rows
                rows += shard.shape[0]
        slots = tuple(i for i, w in enumerate(widths) if w == width)
        first_rows = [shards[group.slots[i].shard] for i in slots]
        state = {n: torch.zeros((rows, width) if per == "element" else rows, device=device) for n, per in optimizer.state_widths.items()}
        weight = torch.zeros(rows, width, dtype=dtype, device=device)
        bands.append(_Band(weight, state, shards, slots, tuple(columns[i] for i in slots), torch.tensor(first_rows, device=device)))
    return bands


def _shift(ids: Tensor, first_rows: Tensor, bounds: Tensor) -> Tensor:
    """Ids local to their shards -> rows of the band; `bounds` are the offsets where slots begin, and the end."""
    if first_rows.numel() == 1 or not ids.numel():
        return ids  # the first shard of a band begins at row 0
    return ids + first_rows.repeat_interleave(bounds.diff())


def _complete_sum(lengths: Tensor) -> Tensor:
    return functional.pad(lengths.cumsum(0), (1, 0))


def _bag_sums(table: Tensor, rows_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
    """(bags, D) float32: the (weighted) sum of each bag's rows."""
    if not rows_N.numel():
        return torch.zeros(offsets.numel() - 1, table.shape[1], device=table.device)
    if table.dtype != torch.float32:  # widen the rows first: torch would sum a float16 table in float16
        table, rows_N = table[rows_N].float(), torch.arange(rows_N.numel(), device=table.device)
    return functional.embedding_bag(rows_N, table, offsets, mode="sum", per_sample_weights=weights_N, include_last_offset=True)
