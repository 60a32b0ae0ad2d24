"""Replace the collections of a user's module by sharded ones.

Tables are born on their ranks: a table on the meta device gets initial values computed for just this rank's rectangles, a function of
(seed, table, row, column) and therefore independent of plan and number of ranks. A table with real rows is copied from.
"""

from __future__ import annotations

import torch
from torch import nn

from rayrec.checkpoint import ShardState
from rayrec.comm.exchange import Exchange
from rayrec.distributed.collections import ShardedEmbeddingBagCollection
from rayrec.distributed.engine import CollectionSpec, ShardedEmbeddings
from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan, check_tables
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.modules.init import fill
from rayrec.optim import SparseOptimizer


def find_collections(module: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """Every collection in a module by its path, in module order.

    Raises:
        ConfigError: there is none, two share a table name, or one is an `EmbeddingCollection`, which is not sharded yet.
    """
    found: dict[str, EmbeddingBagCollection] = {}
    for path, child in module.named_modules():
        if isinstance(child, EmbeddingCollection):
            raise ConfigError(f"{path or 'the module'} is an EmbeddingCollection; only pooled collections can be sharded so far.")
        if isinstance(child, EmbeddingBagCollection):
            found[path] = child
    if not found:
        raise ConfigError(f"{type(module).__name__} holds no EmbeddingBagCollection, so there is nothing to shard; use plain DDP.")
    check_tables([table for child in found.values() for table in child.embedding_bag_configs()])
    return found


def table_configs(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Every table of a module, in module order: what a planner needs."""
    return [table for child in find_collections(module).values() for table in child.embedding_bag_configs()]


def shard_embeddings(
    module: nn.Module,
    plan: ShardingPlan,
    exchange: Exchange,
    optimizer: SparseOptimizer,
    device: torch.device,
    seed: int,
    check_ids: bool = True,
) -> tuple[nn.Module, ShardedEmbeddings]:
    """Replace every collection of `module`, in place.

    Args:
        module: its tables may lie on the meta device.
        plan: covers every table.
        exchange: connects the ranks; nobody else uses it.
        optimizer: of the tables, applied in the backward pass.
        device: where this rank's shards live.
        seed: of initial values; the same on every rank.
        check_ids: check every id before it is sent.
    Returns:
        The module (the sharded collection itself when `module` is a collection) and its engine.
    Raises:
        ConfigError: see `find_collections`.
        PlanError: the plan does not fit the tables or the number of ranks.
    """
    found = find_collections(module)
    specs = [CollectionSpec(path, tuple(child.embedding_bag_configs()), child.is_weighted()) for path, child in found.items()]
    engine = ShardedEmbeddings(specs, plan, exchange, optimizer, device, check_ids)
    configs = {table.name: (table, child) for child in found.values() for table in child.embedding_bag_configs()}
    for state in engine.shard_states():
        table, child = configs[state.shard.table]
        source = child.embedding_bags[table.name].weight
        assert isinstance(source, torch.Tensor)
        _fill(state, table, source, seed)
    sharded = {child: ShardedEmbeddingBagCollection(engine, i, child) for i, child in enumerate(found.values())}
    if isinstance(module, EmbeddingBagCollection):
        return sharded[module], engine
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, EmbeddingBagCollection):
                setattr(parent, name, sharded[part])
    return module, engine


@torch.no_grad()
def _fill(state: ShardState, table: BaseEmbeddingConfig, source: torch.Tensor, seed: int) -> None:
    rows, cols = state.shard.rows, state.shard.cols
    if not source.is_meta:
        state.weight.copy_(source[rows.start : rows.stop, cols.start : cols.stop])
        return
    fill(state.weight, seed, table, rows, cols)
