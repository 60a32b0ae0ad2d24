"""The state_dict of sharded tables, with the unsharded module's names and TorchRec's values.

Every rank has every key; its value holds this rank's rectangles as live views. Loading takes a
whole tensor (each rank copies its rectangles out of it) or a ShardedTensor of the same layout. A
state_dict holds rows only: optimizer state travels in checkpoints (`rayrec.checkpoint`), which
restore under any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)

from rayrec.checkpoint import OverlapWriter, ShardState
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.errors import CommError, ShapeError
from rayrec.layout import BaseEmbeddingConfig, Replicated, Shard
from rayrec.layout.tables import refuse_dynamic
from rayrec.modules import torch_dtype
from rayrec.optim import FusedOptimizer


class TableShards(nn.Module):
    """Stands where the unsharded module keeps one table, and answers for its key `weight`."""

    def __init__(self, engine: ShardedEmbeddings, config: BaseEmbeddingConfig) -> None:
        super().__init__()
        self._engine, self._config = engine, config

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"table {self.name!r} is sharded and has no parameter `weight`; read its rows in "
                "model.state_dict() or model.shard_states(), and write them by "
                "rayrec.distributed.load_table."
            )
        return super().__getattr__(name)

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._config.name

    @property
    def config(self) -> BaseEmbeddingConfig:
        """The table as it is now; it may have grown."""
        tables = self._engine.deployed.world.tables
        return next(table for table in tables if table.name == self.name)

    def local(self) -> list[ShardState]:
        """This rank's rectangles of the table."""
        return [s for s in self._engine.shard_states() if s.shard.table == self.name]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.as_tensor()

    def as_tensor(self) -> Tensor | ShardedTensor:
        """Return the table as one tensor, or as a ShardedTensor when it is spread over ranks.

        It is the live rows when this rank has them in one piece, and a copy when in several.

        Raises:
            ConfigError: the table is dynamic.
            CommError: the table is spread over ranks and there is no process group (a simulated
                world).
        """
        refuse_dynamic(
            [self._config],
            "a tensor of its rows does not say whose they are; "
            "save a checkpoint (rayrec.checkpoint.save_checkpoint)",
        )
        shape = (self._config.num_embeddings, self._config.embedding_dim)
        layout, local = self._engine.plan.tables[self._config.name].layout, self.local()
        if isinstance(layout, Replicated):
            return local[0].weight
        if self._engine.exchange.world_size == 1:
            return whole_table(self._config.name, shape, local)
        if not dist.is_initialized():
            raise CommError(
                f"the state_dict of sharded table {self._config.name!r} needs a process group; "
                "read shard_states() instead."
            )
        # every rank knows where all rectangles lie, since it knows the plan: no collective
        metadata = {}
        for shard in layout.shards(self._config.name):
            start, place = [shard.rows.start, shard.cols.start], self._place_of(shard)
            metadata[shard] = ShardMetadata(start, list(shard.shape), place)
        properties = TensorProperties(dtype=torch_dtype(self._config))
        whole = ShardedTensorMetadata(list(metadata.values()), torch.Size(shape), properties)
        mine = [TorchShard(state.weight.detach(), metadata[state.shard]) for state in local]
        return ShardedTensor._init_from_local_shards_and_global_metadata(mine, whole)

    def _place_of(self, shard: Shard) -> str:
        device = self._engine.device.type
        if device != "cpu":
            device += f":{shard.rank % max(1, torch.cuda.device_count())}"
        return f"rank:{shard.rank}/{device}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = prefix + "weight"
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k != name]
        value = state_dict.get(name)
        if value is None:
            missing_keys.append(name)
            return
        if self._config.dynamic is not None:
            error_msgs.append(
                f"{name}: the table is dynamic, and rows by number do not say whose they are; "
                "restore a checkpoint (rayrec.checkpoint.restore_checkpoint)"
            )
            return
        shape = (self._config.num_embeddings, self._config.embedding_dim)
        given = tuple(value.size()) if isinstance(value, Tensor | ShardedTensor) else type(value)
        # on every rank alike, also where this one holds no shard
        if given != shape:
            error_msgs.append(f"{name}: the table is {shape}, and what is loaded is {given}")
            return
        self.begin_overwrite()
        # the kernels' live rows are written, so nothing is assigned
        for state in self.local():
            try:
                state.weight.detach().copy_(_rectangle(value, state.shard))
            except ShapeError as error:
                error_msgs.append(f"{name}: {error}")

    def begin_overwrite(self) -> None:
        """Tell who follows changes that any row may become another, outside of training."""
        _begin_overwrite(self._engine, [self.name])


def _begin_overwrite(engine: ShardedEmbeddings, tables: Sequence[str] | None = None) -> None:
    """Tell who follows changes that any row of some tables, or of all, may become another."""
    if engine.undo is not None:
        engine.undo.forget()
    if engine.touched is not None:
        engine.touched.touch_all(tables)


def whole_table(name: str, shape: tuple[int, int], parts: Sequence[ShardState]) -> Tensor:
    """Join (rows, columns) of a table from rectangles that cover it; one alone is returned."""
    if len(parts) == 1:
        return parts[0].weight
    first = parts[0].weight
    whole = ShardState(Shard(name, range(shape[0]), range(shape[1]), 0), first.new_empty(shape))
    writer = OverlapWriter()
    for part in parts:
        writer.put(part.shard.rows, part.shard.cols, part.tensors(), whole)
    return whole.weight


def _rectangle(value: Tensor | ShardedTensor, shard: Shard) -> Tensor:
    if isinstance(value, ShardedTensor):
        start = [shard.rows.start, shard.cols.start]
        for part in value.local_shards():
            if part.metadata.shard_offsets == start and part.tensor.shape == shard.shape:
                return part.tensor
        raise ShapeError(
            f"the ShardedTensor holds no rectangle {shard.shape} at ({shard.rows.start}, "
            f"{shard.cols.start}) on this rank; it was saved under another plan. Restore from a "
            "rayrec checkpoint, or load a whole tensor."
        )
    return value[shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]


def fused_optimizer_of(module: nn.Module, engine: ShardedEmbeddings) -> FusedOptimizer:
    """The optimizers of an engine's tables as one torch optimizer.

    Args:
        module: holds the tables' stand-ins, whose paths name its state.
    """
    named = module.named_modules()
    names = {child.name: name for name, child in named if isinstance(child, TableShards)}
    lookups = list(engine.lookups.values())
    sizes = {name: placement.layout.shape for name, placement in engine.plan.tables.items()}
    return FusedOptimizer(
        lookups, lambda table: f"{names[table]}.weight", lambda: _begin_overwrite(engine), sizes
    )
