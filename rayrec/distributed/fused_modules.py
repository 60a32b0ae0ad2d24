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

from torch import nn

from rayrec.distributed.collections import PooledTables, SequenceTables
from rayrec.distributed.fused_collection import Device, FusedCollection
from rayrec.distributed.sharding import replace_modules, tables_of
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig, Storage
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection, get_embedding_names_by_table
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


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
    where = {"device": device, "location": location}
    new: dict[nn.Module, nn.Module] = {}
    for child in model.modules():
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection):
            pooled = isinstance(child, EmbeddingBagCollection)
            kind: Any = FusedEmbeddingBagCollection if pooled else FusedEmbeddingCollection
            tables = tables_of(child)
            new[child] = kind(tables, optimizer_type, optimizer_kwargs, source=child, **where)
    return replace_modules(model, new)
