"""Replace the collections of a user's module by sharded ones.

Tables are born on their ranks: a table on the meta device gets initial values computed for just
this rank's rectangles, a function of (seed, table, row, column) and therefore independent of plan
and number of ranks. A table with real rows is copied from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.checkpoint import ShardState
from rayrec.comm.exchange import Exchange
from rayrec.distributed.collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.fused_collection import FusedCollection
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.distributed.program.options import EngineOptions
from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan, check_tables
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.modules.init import fill
from rayrec.optim import SparseOptimizer, optimizer_of

Collection = EmbeddingBagCollection | EmbeddingCollection | FusedCollection


def tables_of(collection: Collection) -> tuple[BaseEmbeddingConfig, ...]:
    """The tables of a collection of either kind, in order."""
    configs: Any = collection
    return tuple(
        configs.embedding_configs() if _is_sequence(collection) else configs.embedding_bag_configs()
    )


def weight_of(collection: Collection, table: str) -> Tensor:
    """The unsharded rows of one table."""
    if isinstance(collection, FusedCollection):
        return collection.rows_of(table)
    module = (
        collection.embedding_bags[table]
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embeddings[table]
    )
    assert isinstance(module.weight, Tensor)
    return module.weight


def find_collections(module: nn.Module) -> dict[str, Collection]:
    """Every collection in a module by its path, in module order.

    Raises:
        ConfigError: there is none, or two share a table name.
    """
    found = {path: child for path, child in module.named_modules() if isinstance(child, Collection)}
    if not found:
        raise ConfigError(
            f"{type(module).__name__} holds no embedding collection, so there is "
            "nothing to shard; use plain DDP."
        )
    check_tables([table for child in found.values() for table in tables_of(child)])
    return found


def table_configs(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Every table of a module, in module order: what a planner needs."""
    return [table for child in find_collections(module).values() for table in tables_of(child)]


def shard_embeddings(
    module: nn.Module,
    plan: ShardingPlan,
    exchange: Exchange,
    optimizer: SparseOptimizer | Mapping[str, SparseOptimizer],
    device: torch.device,
    seed: int,
    options: EngineOptions | None = None,
    prefetch_exchange: Exchange | None = None,
    peers: Exchange | None = None,
) -> tuple[nn.Module, ShardedEmbeddings]:
    """Replace every collection of `module`, in place.

    Args:
        module: its tables may lie on the meta device.
        plan: covers every table.
        exchange: connects the ranks; nobody else uses it.
        optimizer: of all tables that are not marked by `apply_optimizer_in_backward`, or by table
            name; applied in the backward pass.
        device: where this rank's shards live.
        seed: of initial values; the same on every rank.
        options, prefetch_exchange, peers: see `ShardedEmbeddings`.
    Returns:
        The module (the sharded collection itself when `module` is a collection) and its engine.
    Raises:
        ConfigError: see `find_collections`; or a table has no optimizer.
        PlanError: the plan does not fit the tables or the number of ranks.
    """
    found = find_collections(module)
    configs = {table.name: (table, child) for child in found.values() for table in tables_of(child)}
    optimizers = _optimizers(configs, optimizer)
    specs = [
        CollectionSpec(path, tables_of(child), _is_weighted(child), _is_sequence(child))
        for path, child in found.items()
    ]
    engine = ShardedEmbeddings(
        specs, plan, exchange, optimizers, device, options, prefetch_exchange, peers
    )
    for state in engine.shard_states():
        table, child = configs[state.shard.table]
        _fill(state, table, weight_of(child, table.name), seed)
    sharded: dict[nn.Module, nn.Module] = {
        child: _sharded(engine, i, child) for i, child in enumerate(found.values())
    }
    if module in sharded:
        return sharded[module], engine
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if part in sharded:
                setattr(parent, name, sharded[part])
    return module, engine


def _optimizers(
    configs: Mapping[str, tuple[BaseEmbeddingConfig, Collection]],
    given: SparseOptimizer | Mapping[str, SparseOptimizer],
) -> dict[str, SparseOptimizer]:
    """Of every table: by name, else as marked by `apply_optimizer_in_backward`, else the one for
    all.
    """
    chosen = {}
    for name, (_, child) in configs.items():
        mark = (
            child.sparse_optimizer
            if isinstance(child, FusedCollection)
            else optimizer_of(weight_of(child, name))
        )
        found = (mark or given) if isinstance(given, SparseOptimizer) else given.get(name, mark)
        if found is None:
            raise ConfigError(
                f"table {name!r} has no sparse optimizer; name one for every table, "
                "mark it, or give one for all."
            )
        chosen[name] = found
    return chosen


def _is_sequence(collection: Collection) -> bool:
    return hasattr(collection, "embedding_configs")


def _is_weighted(collection: Any) -> bool:
    return not _is_sequence(collection) and collection.is_weighted()


def _sharded(engine: ShardedEmbeddings, index: int, collection: Any) -> nn.Module:
    kind = ShardedEmbeddingCollection if _is_sequence(collection) else ShardedEmbeddingBagCollection
    return kind(engine, index, collection)


@torch.no_grad()
def _fill(state: ShardState, table: BaseEmbeddingConfig, source: Tensor, seed: int) -> None:
    rows, cols = state.shard.rows, state.shard.cols
    if source.is_meta:
        fill(state.weight, seed, table, rows, cols)
    else:
        state.weight.copy_(source[rows.start : rows.stop, cols.start : cols.stop])
