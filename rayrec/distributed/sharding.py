"""Replace the collections of a user's module by sharded ones.

Tables are born on their ranks: a table on the meta device gets initial values computed for just
this rank's rectangles, a function of (seed, table, row, column) and therefore independent of plan
and number of ranks. A table with real rows is copied from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.checkpoint import ShardState
from rayrec.comm.exchange import Exchange
from rayrec.distributed.collections import (
    Sharded,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.fused_modules import FusedCollection
from rayrec.distributed.kernels.workers import Task, Workers
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan, check_tables
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.modules.init import fills
from rayrec.optim import SparseOptimizer, optimizer_of

Collection = EmbeddingBagCollection | EmbeddingCollection | FusedCollection


def tables_of(collection: Collection) -> tuple[BaseEmbeddingConfig, ...]:
    """Return the tables of a collection of either kind, in order."""
    either: Any = collection
    if is_sequence(collection):
        return tuple(either.embedding_configs())
    return tuple(either.embedding_bag_configs())


def weight_of(collection: Collection, table: str) -> Tensor:
    """Return the unsharded rows of one table."""
    if isinstance(collection, FusedCollection):
        return collection.rows_of(table)
    if isinstance(collection, EmbeddingBagCollection):
        module = collection.embedding_bags[table]
    else:
        module = collection.embeddings[table]
    assert isinstance(module.weight, Tensor)
    return module.weight


def find_collections(module: nn.Module) -> dict[str, Collection]:
    """Return every collection in a module by its path, in module order.

    Raises:
        ConfigError: there is none, or they are sharded already, one has no tables, or two share a
            table name.
    """
    named = module.named_modules()
    collections = {path: child for path, child in named if isinstance(child, Collection)}
    if not collections:
        if any(isinstance(child, Sharded) for child in module.modules()):
            raise ConfigError(
                f"the collections of {type(module).__name__} are sharded already; give "
                "DistributedModelParallel the module as it was before, once, and call what that "
                "returns. To change the plan there is model.reshard(plan)."
            )
        raise ConfigError(
            f"{type(module).__name__} holds no embedding collection, so there is nothing to "
            "shard; use plain DDP."
        )
    for path, child in collections.items():
        if not tables_of(child):
            where = f" at {path!r}" if path else ""
            raise ConfigError(
                f"the {type(child).__name__}{where} has no tables, so there is nothing to shard; "
                "give it tables, or leave it out."
            )
    check_tables([table for child in collections.values() for table in tables_of(child)])
    return collections


def table_configs(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Return every table of a module, in module order: what a planner needs."""
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
        exchange: connects the ranks; nobody else uses it.
        optimizer: one for all tables without a mark of `apply_optimizer_in_backward`, or by table
            name; applied in the backward pass.
        seed: seed of initial values; the same on every rank.
        options, prefetch_exchange, peers: see `ShardedEmbeddings`.
    Returns:
        The module (the sharded collection itself when `module` is a collection) and its engine.
    Raises:
        ConfigError: see `find_collections`; or a table has no optimizer; or memory= is given for
            rows that lie on a GPU.
        PlanError: the plan does not fit the tables or the number of ranks.
    """
    collections = find_collections(module)
    if options is not None and options.memory is not None and device.type != "cpu":
        raise ConfigError(
            f"memory= keeps the rows of CPU ranks, and this rank's lie on {device}; leave it out."
        )
    configs: dict[str, tuple[BaseEmbeddingConfig, Collection]] = {}
    for child in collections.values():
        configs |= {table.name: (table, child) for table in tables_of(child)}
    specs = [
        CollectionSpec(path, tables_of(child), is_weighted(child), is_sequence(child))
        for path, child in collections.items()
    ]
    engine = ShardedEmbeddings(
        specs,
        plan,
        exchange,
        choose_optimizers(module, optimizer),
        device,
        replace(options or EngineOptions(), seed=seed),
        prefetch_exchange,
        peers,
    )
    # only this rank's rectangles are made or copied; no rank holds a whole table
    makes_values = engine.options.initialize and not engine.options.adopt
    tasks: list[Task] = []
    for state in engine.shard_states() if makes_values else ():
        table, child = configs[state.shard.table]
        if table.dynamic is not None:
            continue  # a row gets its first values when an id gets the row
        tasks += _fills(state, table, weight_of(child, table.name), seed)
    # the host's threads, wherever the rows lie
    Workers(torch.get_num_threads()).run(tasks)
    sharded: dict[nn.Module, nn.Module] = {}
    for i, child in enumerate(collections.values()):
        kind: Any = ShardedEmbeddingBagCollection
        if is_sequence(child):
            kind = ShardedEmbeddingCollection
        sharded[child] = kind(engine, i, child)
    return replace_modules(module, sharded), engine


def replace_modules(module: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put new modules in the place of old ones, everywhere below `module`, in place.

    Returns:
        The module, or the new one when `module` itself is replaced.
    """
    if module in new:
        return new[module]
    for parent in list(module.modules()):
        # named_children() leaves out the second name of a part that has two in one parent
        for name, part in list(parent._modules.items()):
            if part is not None and part in new:
                setattr(parent, name, new[part])
    return module


def choose_optimizers(
    module: nn.Module, given: SparseOptimizer | Mapping[str, SparseOptimizer]
) -> dict[str, SparseOptimizer]:
    """Return each table's optimizer: by name, else as marked on the table, else that for all.

    Raises:
        ConfigError: see `find_collections`; or a table has none, or is frozen and has one that
            would train it; or the mapping names a table that is none of the module's.
    """
    chosen: dict[str, SparseOptimizer] = {}
    for child in find_collections(module).values():
        for table in tables_of(child):
            name = table.name
            if isinstance(child, FusedCollection):
                mark: SparseOptimizer | None = child.sparse_optimizer
            else:
                mark = optimizer_of(weight_of(child, name))
            one = (mark or given) if isinstance(given, SparseOptimizer) else given.get(name, mark)
            if one is None:
                raise ConfigError(
                    f"table {name!r} has no sparse optimizer; name one for every table, mark it, "
                    "or give one for all."
                )
            frozen = (
                not isinstance(child, FusedCollection) and not weight_of(child, name).requires_grad
            )
            if frozen and one.lr > 0:
                raise ConfigError(
                    f"table {name!r} is frozen (requires_grad=False), and a backward pass through "
                    f"a sharded table trains it. Give it sparse_optimizer={{{name!r}: SGD(lr=0.0), "
                    "...}, or thaw it and call its collection under torch.no_grad()."
                )
            chosen[name] = one
    strange = [] if isinstance(given, SparseOptimizer) else sorted(given.keys() - chosen.keys())
    if strange:
        raise ConfigError(
            f"sparse_optimizer names table {strange[0]!r}, which is not among the model's "
            f"{sorted(chosen)[:20]}."
        )
    return chosen


def is_sequence(collection: Collection) -> bool:
    """Return True if a collection gives a row per id, and does not pool."""
    return hasattr(collection, "embedding_configs")


def is_weighted(collection: Any) -> bool:
    """Return True if the bags of a collection carry a weight per id."""
    return not is_sequence(collection) and collection.is_weighted()


def _fills(
    state: ShardState, table: BaseEmbeddingConfig, source: Tensor, seed: int
) -> Sequence[Task]:
    """Return the tasks that fill a shard with its first rows."""
    rows, cols = state.shard.rows, state.shard.cols
    if source.is_meta:
        return fills(state.weight, seed, table, rows, cols)
    given = source.detach()[rows.start : rows.stop, cols.start : cols.stop]
    return [partial(state.weight.detach().copy_, given)]
