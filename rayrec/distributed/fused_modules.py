"""Embedding collections of one process that are trained inside the backward pass.

They need neither sharding nor a process group, and make no gradient of table size.
`FusedEmbeddingBagCollection` and `FusedEmbeddingCollection` have TorchRec's names and arguments,
and the state_dict of the collections that they stand for. They are the sharded runtime with a world
of one rank, so kernels, optimizers and what they cost are the same (docs/optimizers.md). Their rows
are not among `parameters()`.

In a job of several processes each has tables of its own, which nobody keeps equal: there,
`DistributedModelParallel` shards them as it shards the plain collections, with the optimizer that
they have. Rows are kept then, optimizer state begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.comm.choose import usable_device
from rayrec.comm.exchange import LocalExchange
from rayrec.distributed.collections import PooledTables, SequenceTables
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.state import fused_optimizer_of
from rayrec.errors import ConfigError
from rayrec.layout import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    ShardingPlan,
    Storage,
    TablePlacement,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table
from rayrec.optim import FusedOptimizer, as_sparse_optimizer
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Device = torch.device | str | None


class FusedCollection(nn.Module):
    """An embedding collection of one process whose tables are updated inside the backward pass.

    Args:
        plain: the collection that it stands for, which has the tables.
        attribute: name of the modules by table, under which rows are in the state_dict.
    """

    def __init__(
        self,
        plain: nn.Module,
        attribute: str,
        optimizer_type: type,
        optimizer_kwargs: Mapping[str, Any] | None,
        device: Device,
        location: Storage | None,
    ) -> None:
        super().__init__()
        self._attribute = attribute
        self._type, self._kwargs = optimizer_type, dict(optimizer_kwargs or {})
        self.sparse_optimizer = as_sparse_optimizer(optimizer_type, optimizer_kwargs or {})
        self._engine: ShardedEmbeddings | None = None
        self._inner: list[nn.Module] = []  # in a list, so that nn.Module does not register it
        on = usable_device("cpu" if device is None else device)
        if on.type != "meta":
            plain, self._engine = self._alone(plain, on, location or Storage())
            self._inner = [plain]
        self.add_module(attribute, getattr(plain, attribute))

    def _alone(
        self, plain: Any, device: torch.device, location: Storage
    ) -> tuple[nn.Module, ShardedEmbeddings]:
        """Return a collection on a world of this one process, and its engine."""
        # that module shards fused collections, too, so it comes above this one
        from rayrec.distributed.sharding import shard_embeddings, tables_of

        placements = {
            table.name: TablePlacement(table_wise(table, 0), location) for table in tables_of(plain)
        }
        plan = ShardingPlan(world_size=1, tables=placements)
        # counts more than a mark on a parameter
        by_name = dict.fromkeys(placements, self.sparse_optimizer)
        return shard_embeddings(plain, plan, LocalExchange(), by_name, device, torch.initial_seed())

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
        return fused_optimizer_of(self, self._engine)

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


class FusedEmbeddingBagCollection(PooledTables, FusedCollection):
    """An `EmbeddingBagCollection` whose backward pass updates its tables.

    Args:
        tables: tables to look up; names are unique.
        optimizer_type: a class of rayrec.optim.SPARSE_OPTIMIZERS, or of torch with a counterpart.
        is_weighted: True if each id counts times its weight in the batch.
        device: device of the rows, by default the CPU; "meta" makes a description to be sharded.
        location: memory of that device for the rows, see `Storage`.
        source: a collection of the same tables whose rows are taken over; initial values otherwise.
    Raises:
        ConfigError: the tables contradict themselves, no kernel applies the optimizer, or there is
            no such device.

    Example:
        tables = FusedEmbeddingBagCollection([...], RowWiseAdagrad, {"lr": 0.02})
        tables(ids).values().sum().backward()  # has updated the rows
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer_type: type,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: Device = None,
        location: Storage | None = None,
        source: EmbeddingBagCollection | None = None,
    ) -> None:
        plain = source or EmbeddingBagCollection(tables, is_weighted, device="meta")
        super().__init__(
            plain, "embedding_bags", optimizer_type, optimizer_kwargs, device, location
        )
        self._configs, self._weighted = plain.embedding_bag_configs(), plain.is_weighted()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Do as `EmbeddingBagCollection.forward`; its backward pass updates the tables.

        Raises:
            ConfigError: the tables lie on the meta device.
            InputError: a feature is missing, an id is out of range, or weights are missing.
        """
        return self._look_up(features)


class FusedEmbeddingCollection(SequenceTables, FusedCollection):
    """An `EmbeddingCollection` whose backward pass updates its tables.

    Args:
        need_indices: True makes the outputs carry the looked-up ids as their weights.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        device: Device = None,
        need_indices: bool = False,
        location: Storage | None = None,
        source: EmbeddingCollection | None = None,
    ) -> None:
        plain = source or EmbeddingCollection(tables, device="meta", need_indices=need_indices)
        super().__init__(plain, "embeddings", optimizer_type, optimizer_kwargs, device, location)
        self._configs, self._need_indices = plain.embedding_configs(), plain.need_indices()
        self._names = get_embedding_names_by_table(self._configs)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Do as `EmbeddingCollection.forward`; its backward pass updates the tables.

        Raises:
            ConfigError: the tables lie on the meta device.
            InputError: a feature is missing, or an id is out of range.
        """
        return self._look_up(features)


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    device: Device = None,
    location: Storage | None = None,
) -> nn.Module:
    """Replace every embedding collection of a module by a fused one with its rows, in place.

    Args:
        model: a module that holds collections, or a collection.
    Returns:
        The module; the fused collection when `model` is a collection.
    Raises:
        ConfigError: the optimizer has no counterpart in the lookup kernels.
    """
    from rayrec.distributed.sharding import replace_modules, tables_of

    where = {"device": device, "location": location}
    new: dict[nn.Module, nn.Module] = {}
    for child in model.modules():
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection):
            pooled = isinstance(child, EmbeddingBagCollection)
            kind: Any = FusedEmbeddingBagCollection if pooled else FusedEmbeddingCollection
            tables = tables_of(child)
            new[child] = kind(tables, optimizer_type, optimizer_kwargs, source=child, **where)
    return replace_modules(model, new)
