"""The lookup step: one fused kernel over one group of shards, which updates its rows in the backward pass.

The kernel is FBGEMM's table-batched embedding with sum pooling; tables of different widths share it, and slots of one shard share the
shard. Rows and optimizer state are the kernel's; `shard_states` shows them as rectangles, which checkpoints, resharding and initial
values write through. The device of the tensors decides between the CPU and the CUDA kernel.
"""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.distributed.route import GroupIds
from rayrec.distributed.slots import LookupGroup
from rayrec.layout import DataType
from rayrec.optim import SGD, Adagrad, RowWiseAdagrad, SparseOptimizer

_KERNEL_OPTIMIZER = {SGD: EmbOptimType.EXACT_SGD, Adagrad: EmbOptimType.EXACT_ADAGRAD, RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD}
_KERNEL_TYPE = {DataType.FP32: SparseType.FP32, DataType.FP16: SparseType.FP16}


class FusedLookup:
    """The shards of one `LookupGroup` of this rank, their optimizer state, and the kernel over them.

    Args:
        group: what to look up.
        optimizer: the update that the backward pass applies.
        device: where rows live and the kernel runs.
    """

    def __init__(self, group: LookupGroup, optimizer: SparseOptimizer, device: torch.device) -> None:
        self.group, self.optimizer = group, optimizer
        on_cpu = device.type == "cpu"
        on_gpu = EmbeddingLocation.DEVICE if group.key.storage == "device" else EmbeddingLocation.MANAGED
        location = EmbeddingLocation.HOST if on_cpu else on_gpu
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(*shard.shape, location, compute) for shard in group.shards],
            feature_table_map=list(group.slot_shards),
            weights_precision=_KERNEL_TYPE[group.key.data_type],
            output_dtype=SparseType.FP32,
            optimizer=_KERNEL_OPTIMIZER[type(optimizer)],
            learning_rate=optimizer.lr,
            eps=optimizer.hyperparameters.get("eps", 1e-8),
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            device=device,
            bounds_check_mode=BoundsCheckMode.NONE,  # ids are checked where they enter, with names that mean something
            table_names=[f"{s.table}/r{s.rows.start}c{s.cols.start}" for s in group.shards],
        )

    def __call__(self, routed: GroupIds) -> Tensor:
        """Pool the rows of every slot's bags.

        Returns:
            (bags of all ranks, sum of slot widths) float32; its backward updates the rows.
        """
        return self.kernel(routed.ids, routed.offsets, per_sample_weights=routed.weights)

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of the updates to come."""
        self.kernel.set_learning_rate(lr)

    def shard_states(self) -> list[ShardState]:
        """Live views of the rows and optimizer state of every shard."""
        weights = self.kernel.split_embedding_weights()
        states = self.kernel.split_optimizer_states() or [() for _ in weights]
        names = list(self.optimizer.state_widths)
        found = []
        for shard, weight, state in zip(self.group.shards, weights, states, strict=True):
            tensors = state if isinstance(state, (list, tuple)) else (state,)
            views = {n: t.view(-1) if self.optimizer.state_widths[n] == "row" else t for n, t in zip(names, tensors, strict=True)}
            found.append(ShardState(shard=shard, weight=weight, optimizer=views))
        return found
