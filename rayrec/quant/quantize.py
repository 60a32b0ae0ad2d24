"""`quantize`: a model in memory, with its collections exchanged for packed ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

from rayrec.errors import ConfigError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.quant.collections import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from rayrec.quant.types import QuantType, Types, types_of

Reference = EmbeddingBagCollection | EmbeddingCollection
Packed = QuantEmbeddingBagCollection | QuantEmbeddingCollection


def reference_collections(model: nn.Module) -> dict[str, Reference]:
    """The reference collections of a model, by their names in it; "" is the model itself."""
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    return {name: child for name, child in model.named_modules() if isinstance(child, kinds)}


def configs_of(collection: Reference | Packed) -> list[BaseEmbeddingConfig]:
    """The tables of a collection, in order."""
    if isinstance(collection, (EmbeddingBagCollection, QuantEmbeddingBagCollection)):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def exchanged(model: nn.Module, packed: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a model with other modules in the places of its collections.

    The tables of the collections are not copied.

    Args:
        packed: the modules by the names of the collections.
    """
    collections = reference_collections(model)
    # deepcopy takes what the memo has for an object in place of a copy of it
    memo = {id(collections[name]): module for name, module in packed.items()}
    return copy.deepcopy(model, memo)


def quantize(model: nn.Module, types: Types = QuantType.INT8) -> nn.Module:
    """Pack the tables of a model, or of one collection.

    Args:
        model: a reference collection, or a model that holds some; it stays as it is.
        types: one type for all tables, or types by table name; the name "*" stands for the rest.
    Returns:
        a `QuantEmbeddingBagCollection` or `QuantEmbeddingCollection` for a collection; for a model
        a copy, in evaluation mode, whose collections are such.
    Raises:
        ConfigError: the model has no reference collection, a type or table is not known, or a table
            is dynamic.
        InputError: a row cannot be packed; names table and row.
    """
    collections = reference_collections(model)
    if not collections:
        raise ConfigError(
            f"{type(model).__name__} holds no EmbeddingBagCollection and no EmbeddingCollection to "
            "quantize. Save a checkpoint of a sharded model and export that, with rayrec export."
        )
    every = [table.name for one in collections.values() for table in configs_of(one)]
    kinds = types_of(dict.fromkeys(every), types)
    packed: dict[str, Packed] = {}
    for name, one in collections.items():
        own = {table.name: kinds[table.name] for table in configs_of(one)}
        if isinstance(one, EmbeddingBagCollection):
            packed[name] = QuantEmbeddingBagCollection.from_float(one, own)
        else:
            packed[name] = QuantEmbeddingCollection.from_float(one, own)
    return packed[""] if "" in packed else exchanged(model, packed).eval()
