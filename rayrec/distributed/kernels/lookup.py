"""The lookup step: one kernel over one group of shards, which updates its rows in the backward
pass.

`FusedLookup` is FBGEMM's table-batched embedding with sum pooling; `TorchLookup` does the same with
its update in torch. `make_lookup` takes FBGEMM's kernels where they train the optimizer as defined
and are the faster. On CPU they have SGD, Adagrad and row-wise Adagrad, and ignore weight decay for
tables of one feature without saying so (fbgemm-gpu-cpu 1.8.0), so every decay goes to torch there.
Only their row-wise Adagrad of float32 tables is vectorized, which `RowWiseAdagradLookup` calls; the
rest is faster in torch (benchmarks/lookup.py). On CUDA they have more of them, with the decay that
belongs to each. Those of LAMB and LARS divide by 0 (`Fbgemm.on_cuda`), and Adam's refuses float16
tables (fbgemm-gpu 1.8.0: it takes an optional state that nobody passes for a float16 one and wants
float32).

Tables of different widths share a kernel, and slots of one shard share the shard. `shard_states`
shows rows and optimizer state as live rectangles, which checkpoints, resharding and initial values
write through.
"""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm.pages import Allocate, private_memory
from rayrec.distributed.kernels.cpu_lookup import RowWiseAdagradLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.torch_lookup import TorchLookup
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import LookupGroup, is_vectorized
from rayrec.layout import DataType
from rayrec.optim import SparseOptimizer

_TRAINED_TYPES = (DataType.FP32, DataType.FP16)  # that FBGEMM's kernels train
_ON_GPU = {
    "device": EmbeddingLocation.DEVICE,
    "host": EmbeddingLocation.MANAGED,
    "cached": EmbeddingLocation.MANAGED_CACHING,
}
_DECAY_MODE = {"l2": WeightDecayMode.L2, "decoupled": WeightDecayMode.DECOUPLE}
# set in another way, or not at all
_NO_ARGUMENTS = ("lr", "max_gradient", "max_row_norm", "weight_decay_mode")


def make_lookup(
    group: LookupGroup,
    device: torch.device,
    workers: Workers | None = None,
    space: TableSpace | None = None,
    allocate: Allocate = private_memory,
) -> FusedLookup | RowWiseAdagradLookup | TorchLookup:
    """FBGEMM's kernel where it trains a group's optimizer as defined and is the faster, else the
    one with its update in torch.

    Args:
        group: slots and shards to look up; its key names the optimizer.
        device: device of the rows and of the kernel.
        workers: threads that share the work on CPU; the calling thread alone when None.
        space: the shared memory of rows that are read in place, on CPU; None for rows of its own.
        allocate: gives memory of so many bytes, zeros or what a process before left there, on CPU.
    Raises:
        ConfigError: only the torch kernel trains this, and the rows shall live outside of a GPU's
            memory.
    """
    if device.type == "cpu":
        if is_vectorized(group.key.optimizer, group.key.data_type):
            return RowWiseAdagradLookup(group, workers or Workers(), space, allocate)
        return TorchLookup(group, device, workers, space, allocate)
    fused = (
        has_fused_kernel(group.key.optimizer, device.type, group.key.data_type)
        and not group.key.odd
        and group.key.data_type in _TRAINED_TYPES
    )
    return (FusedLookup if fused else TorchLookup)(group, device)


def has_fused_kernel(
    optimizer: SparseOptimizer, device_type: str, data_type: DataType = DataType.FP32
) -> bool:
    """Return whether FBGEMM's kernel on "cpu" or "cuda" applies exactly this optimizer's update.

    Args:
        data_type: element type of the rows.
    """
    kernel = optimizer.fbgemm
    if kernel is None or optimizer.max_row_norm is not None:
        return False
    if device_type == "cpu":
        return kernel.on_cpu and not optimizer.weight_decay
    if not kernel.on_cuda or (data_type is not DataType.FP32 and not kernel.float16):
        return False
    return not optimizer.weight_decay or optimizer.decay_mode in kernel.decays


def kernel_arguments(optimizer: SparseOptimizer) -> dict[str, Any]:
    """Return the optimizer as keyword arguments of FBGEMM's kernel, which it has."""
    assert optimizer.fbgemm is not None
    values = optimizer.hyperparameters
    arguments = {name: value for name, value in values.items() if name not in _NO_ARGUMENTS}
    arguments = {"eps": 1e-8, **arguments}
    arguments["optimizer"] = EmbOptimType[optimizer.fbgemm.name]
    arguments["learning_rate"] = values["lr"]
    # the others have one fixed mode, and NONE means it
    if optimizer.weight_decay and len(optimizer.fbgemm.decays) > 1:
        arguments["weight_decay_mode"] = _DECAY_MODE[optimizer.decay_mode]
    if optimizer.max_gradient is not None:
        arguments |= {"gradient_clipping": True, "max_gradient": optimizer.max_gradient}
    return arguments


class FusedLookup:
    """The shards of one `LookupGroup` of this rank, their optimizer state, and FBGEMM's kernel over
    them.

    Args:
        group: slots and shards to look up; its key names the optimizer.
        device: device of the rows and of the kernel.
    """

    def __init__(self, group: LookupGroup, device: torch.device) -> None:
        optimizer = group.key.optimizer
        trains = has_fused_kernel(optimizer, device.type, group.key.data_type)
        assert trains, "make_lookup takes TorchLookup where FBGEMM would make another update"
        self.group, self.optimizer, self.learning_rate = group, optimizer, optimizer.lr
        self.base_rate: float | None = None
        on_cpu = device.type == "cpu"
        storage = group.key.storage
        location = EmbeddingLocation.HOST if on_cpu else _ON_GPU[storage.kind]
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(*shard.shape, location, compute) for shard in group.shards],
            feature_table_map=list(group.slot_shards),
            weights_precision=SparseType[group.key.data_type.name],
            output_dtype=SparseType.FP32,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            device=device,
            # ids are checked where they enter, with names that mean something
            bounds_check_mode=BoundsCheckMode.NONE,
            cache_load_factor=storage.load_factor or 1.0,  # read only where there is a cache
            table_names=[f"{s.table}/r{s.rows.start}c{s.cols.start}" for s in group.shards],
            **kernel_arguments(optimizer),
        )

    def __call__(self, routed: GroupIds) -> Tensor:
        """Pool the rows of every slot's bags.

        Returns:
            (bags, sum of slot widths) float32; its backward updates the rows.
        """
        before = self.iteration
        pooled = self.kernel(routed.ids, routed.offsets, per_sample_weights=routed.weights)
        if not torch.is_grad_enabled():
            self.iteration = before  # the kernel counts every forward, and evaluation is no step
        return pooled

    @property
    def iteration(self) -> int:
        """Updates so far; always 0 for optimizers that do not correct their bias."""
        return int(self.kernel.iter_cpu) if self.optimizer.counts_updates else 0

    @iteration.setter
    def iteration(self, value: int) -> None:
        if self.optimizer.counts_updates:
            self.kernel.iter_cpu.fill_(value)
            self.kernel.iter.fill_(value)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        self.learning_rate = lr
        self.kernel.set_learning_rate(lr)

    def shard_states(self) -> list[ShardState]:
        """Return live views of the rows and optimizer state of every shard.

        Rows with a cache are written back and leave it, so that the views are whole and what is
        written through them counts. They are live until the next lookup; ask again after that.
        """
        self.kernel.flush()
        self.kernel.reset_cache_states()
        widths = self.optimizer.state_widths
        tables = self.kernel.split_embedding_weights()
        states = self.kernel.split_optimizer_states() or [() for _ in tables]
        found = []
        for shard, table, state in zip(self.group.shards, tables, states, strict=True):
            views = {
                name: t.view(-1) if widths[name] == "row" else t
                for name, t in zip(widths, state, strict=True)
            }
            found.append(ShardState(shard=shard, weight=table, optimizer=views))
        return found
