"""Row-wise Adagrad on CPU by FBGEMM's operators alone, without the module around them.

The module costs about as much time per step as a small lookup itself, and allocates its rows where it likes. Here they lie on huge pages
where the kernel allows them, since looking up random rows is bound by the translation of addresses. float32 rows and no weight decay:
this is the one update that FBGEMM's CPU kernels vectorize, for tables that one feature looks up.
"""

# S slots, T shards, N ids, D columns of all slots

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.distributed.route import GroupIds
from rayrec.distributed.slots import LookupGroup
from rayrec.layout import DataType
from rayrec.optim import RowWiseAdagrad, SparseOptimizer
from rayrec.sparse.ops import offsets_of

_HUGE_PAGE = 2 << 20
_SUM, _FLOAT32 = 0, 0  # FBGEMM's pooling mode and element type


def table_memory(values: int) -> Tensor:
    """(values,) float32 zeros, on huge pages where the kernel allows them."""
    if values * 4 < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(values)
    memory = mmap.mmap(-1, values * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


class RowWiseAdagradLookup:
    """A `Lookup` of one group on CPU; see the module.

    Args:
        group: what to look up.
        optimizer: a row-wise Adagrad.
    """

    iteration = 0  # row-wise Adagrad corrects no bias

    def __init__(self, group: LookupGroup, optimizer: RowWiseAdagrad) -> None:
        self.group, self.optimizer = group, optimizer
        rows = [shard.shape[0] for shard in group.shards]
        widths = [shard.shape[1] for shard in group.shards]
        self._bounds = offsets_of(r * w for r, w in zip(rows, widths, strict=True))
        self._row_bounds = offsets_of(rows)
        self.rows = table_memory(self._bounds[-1])
        self.sums = torch.zeros(self._row_bounds[-1])
        slots = group.slot_shards
        self._width = sum(widths[s] for s in slots)
        self._widest = max(widths)
        self._row_offsets = torch.tensor([self._bounds[s] for s in slots])
        self._sum_offsets = torch.tensor([self._row_bounds[s] for s in slots])
        self._columns = torch.tensor(offsets_of(widths[s] for s in slots), dtype=torch.int32)
        self._sizes = torch.tensor([*(self._row_bounds[s] for s in slots), self._row_bounds[-1]])
        self._bits = max(1, (self._row_bounds[-1]).bit_length())
        self._places = torch.zeros(len(slots), dtype=torch.int32)
        self._all = torch.ones(len(slots), dtype=torch.int32)
        self._lr = torch.tensor(optimizer.lr)
        self._anchor = torch.zeros(0, requires_grad=True)

    @staticmethod
    def trains(optimizer: SparseOptimizer, data_type: DataType) -> bool:
        """Whether this lookup applies exactly the optimizer's update."""
        plain = isinstance(optimizer, RowWiseAdagrad) and not optimizer.weight_decay
        return plain and data_type is DataType.FP32 and optimizer.max_gradient is None and optimizer.max_row_norm is None

    def __call__(self, routed: GroupIds) -> Tensor:
        """(bags, D) float32: the pooled rows of every slot's bags; its backward updates the rows."""
        return _LookUp.apply(self, self._anchor, routed.ids, routed.offsets, routed.weights)

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """The kernel's forward pass."""
        return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            self.rows, self._row_offsets, self._columns, self._width, self._sizes, ids, offsets, _SUM, weights, _FLOAT32
        )

    def update(self, grad: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        """The kernel's backward pass, which updates the rows."""
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
            grad, self.rows, self._places, self._row_offsets, self._columns, self._widest, self._sizes, self._bits, ids, offsets, _SUM,
            weights, False, self.sums, self._places, self._sum_offsets, self._lr, self.optimizer.eps,
        )  # fmt: skip

    def weight_grad(self, grad: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """(N,) gradient of the per-id weights."""
        return torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            grad, self.rows, self._row_offsets, self._columns, ids, offsets, self._all
        )

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of the updates to come."""
        self._lr.fill_(lr)

    def shard_states(self) -> list[ShardState]:
        """Live views of the rows and optimizer state of every shard."""
        (name,) = self.optimizer.state_widths
        found = []
        for i, shard in enumerate(self.group.shards):
            rows = self.rows[self._bounds[i] : self._bounds[i + 1]].view(shard.shape)
            found.append(ShardState(shard=shard, weight=rows, optimizer={name: self.sums[self._row_bounds[i] : self._row_bounds[i + 1]]}))
        return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: RowWiseAdagradLookup, anchor: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        ctx.lookup, ctx.routed = lookup, (ids, offsets, None if weights is None else weights.detach())
        return lookup.look_up(*ctx.routed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        ids, offsets, weights = ctx.routed
        weight_grad = ctx.lookup.weight_grad(grad, ids, offsets) if ctx.needs_input_grad[4] else None
        ctx.lookup.update(grad, ids, offsets, weights)
        return None, None, None, None, weight_grad
