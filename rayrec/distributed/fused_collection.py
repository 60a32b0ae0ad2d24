"""`FusedCollection`: what the two fused collections share, and what sharding must know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.errors import ConfigError
from rayrec.optim import FusedOptimizer, SparseOptimizer


class FusedCollection(nn.Module):
    """An embedding collection of one process whose tables are updated inside the backward pass.

    Args:
        tables: module by table, under which the table's rows are in the state_dict.
    """

    def __init__(
        self,
        tables: nn.ModuleDict,
        attribute: str,
        optimizer_type: type,
        optimizer_kwargs: Mapping[str, Any],
        optimizer: SparseOptimizer,
    ) -> None:
        super().__init__()
        self.add_module(attribute, tables)
        self._attribute = attribute
        self._type, self._kwargs = optimizer_type, dict(optimizer_kwargs)
        self.sparse_optimizer = optimizer
        self._engine: ShardedEmbeddings | None = None
        self._inner: list[nn.Module] = []  # in a list, so that nn.Module does not register it

    def _run_by(self, inner: nn.Module, engine: ShardedEmbeddings) -> None:
        self._inner, self._engine = [inner], engine

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        probe = fn(torch.empty(0, device=self.device))
        if probe.device != self.device:
            raise ConfigError(
                f"the rows of a {type(self).__name__} on {self.device} cannot move to "
                f"{probe.device}; make it there: device={probe.device.type!r}."
            )
        return super()._apply(fn, recurse)

    def _look_up(self, features: Any) -> Any:
        if not self._inner:
            raise ConfigError(
                f"this {type(self).__name__} lies on the meta device and has no rows. Make it on "
                "a real device, or shard the model that holds it (DistributedModelParallel)."
            )
        # it is no child, so train() and eval() do not reach it
        self._inner[0].training = self.training
        return self._inner[0](features)

    def rows_of(self, table: str) -> Tensor:
        """Return (num_embeddings, embedding_dim): the live rows of a table, or a meta tensor."""
        if self._engine is None:
            weight = getattr(self, self._attribute)[table].weight
            assert isinstance(weight, Tensor)
            return weight
        (state,) = (state for state in self._engine.shard_states() if state.shard.table == table)
        return state.weight

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The tables' optimizer as a torch optimizer: rates and state by parameter name."""
        if self._engine is None:
            return FusedOptimizer([])
        kernels = list(self._engine.lookups.values())
        sizes = {name: one.layout.shape for name, one in self._engine.plan.tables.items()}
        return FusedOptimizer(
            kernels, lambda table: f"{self._attribute}.{table}.weight", sizes=sizes
        )

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        if self._engine is not None:
            self._engine.set_learning_rate(lr)

    def grow(self) -> dict[str, int]:
        """Double dynamic tables most of whose rows are in use; see `EngineFront.grow`."""
        return {} if self._engine is None else self._engine.grow()

    def optimizer_type(self) -> type:
        """Return the class that was asked for."""
        return self._type

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Arguments of that class."""
        return self._kwargs

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return torch.device("meta") if self._engine is None else self._engine.device
