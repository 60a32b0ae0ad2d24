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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rayrec.comm.choose import usable_device
from rayrec.comm.exchange import LocalExchange
from rayrec.distributed.fused_collection import FusedCollection
from rayrec.distributed.sharding import replace_modules, shard_embeddings
from rayrec.layout import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    ShardingPlan,
    Storage,
    TablePlacement,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table
from rayrec.optim import as_sparse_optimizer
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Device = torch.device | str | None


class FusedEmbeddingBagCollection(FusedCollection):
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
        optimizer = as_sparse_optimizer(optimizer_type, optimizer_kwargs or {})
        plain = source or EmbeddingBagCollection(tables, is_weighted, device="meta")
        on = usable_device("cpu" if device is None else device)
        inner, engine = (
            (None, None) if on.type == "meta" else _alone(plain, optimizer, on, location)
        )
        held = (inner or plain).embedding_bags
        super().__init__(held, "embedding_bags", optimizer_type, optimizer_kwargs or {}, optimizer)
        self._configs, self._weighted = plain.embedding_bag_configs(), plain.is_weighted()
        if inner is not None and engine is not None:
            self._run_by(inner, engine)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Do as `EmbeddingBagCollection.forward`; its backward pass updates the tables.

        Raises:
            ConfigError: the tables lie on the meta device.
            InputError: a feature is missing, an id is out of range, or weights are missing.
        """
        return self._look_up(features)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether ids count times their weights."""
        return self._weighted


class FusedEmbeddingCollection(FusedCollection):
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
        optimizer = as_sparse_optimizer(optimizer_type, optimizer_kwargs or {})
        plain = source or EmbeddingCollection(tables, device="meta", need_indices=need_indices)
        on = usable_device("cpu" if device is None else device)
        inner, engine = (
            (None, None) if on.type == "meta" else _alone(plain, optimizer, on, location)
        )
        held = (inner or plain).embeddings
        super().__init__(held, "embeddings", optimizer_type, optimizer_kwargs or {}, optimizer)
        self._configs, self._need_indices = plain.embedding_configs(), plain.need_indices()
        if inner is not None and engine is not None:
            self._run_by(inner, engine)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Do as `EmbeddingCollection.forward`; its backward pass updates the tables.

        Raises:
            ConfigError: the tables lie on the meta device.
            InputError: a feature is missing, or an id is out of range.
        """
        return self._look_up(features)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""
        return get_embedding_names_by_table(self._configs)

    def embedding_dim(self) -> int:
        """The width of all tables; -1 when there are none."""
        return self._configs[0].embedding_dim if self._configs else -1

    def need_indices(self) -> bool:
        """Return whether the outputs carry the ids as their weights."""
        return self._need_indices


def _alone(
    plain: Any, optimizer: Any, device: torch.device, location: Storage | None
) -> tuple[Any, Any]:
    """Return a collection on a world of this one process, and its engine."""
    sequence = isinstance(plain, EmbeddingCollection)
    tables = plain.embedding_configs() if sequence else plain.embedding_bag_configs()
    placements = {
        table.name: TablePlacement(table_wise(table, 0), location or Storage()) for table in tables
    }
    plan = ShardingPlan(world_size=1, tables=placements)
    by_name = dict.fromkeys(placements, optimizer)  # counts more than a mark on a parameter
    return shard_embeddings(plain, plan, LocalExchange(), by_name, device, torch.initial_seed())


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

    where: dict[str, Any] = {"device": device, "location": location}

    def fused(plain: nn.Module) -> nn.Module | None:
        if isinstance(plain, EmbeddingBagCollection):
            tables = plain.embedding_bag_configs()
            return FusedEmbeddingBagCollection(
                tables, optimizer_type, optimizer_kwargs, source=plain, **where
            )
        if isinstance(plain, EmbeddingCollection):
            return FusedEmbeddingCollection(
                plain.embedding_configs(), optimizer_type, optimizer_kwargs, source=plain, **where
            )
        return None

    new = {child: collection for child in model.modules() if (collection := fused(child))}
    return replace_modules(model, new)
