"""Moves tables to another plan between two steps; only what changes its owner travels.

Every rank holds shards under the old plan and takes shards under the new one, so this is `pass_on`
with one world twice. It goes table by table: the extra memory is the new shards and what arrives of
one table. Row-wise state follows the rules of `rayrec.shards.overlap`.

A dynamic table that gets other rows has its cuts at the same blocks, so no row leaves its rank.
`rows_to_grow` says which of them are to get more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from rayrec.distributed.deployed import Deployed, deploy
from rayrec.distributed.passing import Columns, RowType, pass_on
from rayrec.dynamic.resize import move_rows
from rayrec.dynamic.rows import id_columns
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan
from rayrec.modules import torch_dtype
from rayrec.optim import SparseOptimizer
from rayrec.shards.overlap import fill
from rayrec.shards.state import WEIGHT


def columns_under(table: BaseEmbeddingConfig, optimizer: SparseOptimizer) -> Columns:
    """Return the columns of a table: its rows, the state of its optimizer, which is float32, and of
    a dynamic table its ids.
    """
    columns = {WEIGHT: RowType(torch_dtype(table), is_row_wise=False)}
    for name, per in optimizer.state_widths.items():
        columns[name] = RowType(torch.float32, is_row_wise=per == "row")
    for name, dtype in id_columns(table).items():
        columns[name] = RowType(dtype, is_row_wise=True)
    return columns


def redeploy(old: Deployed, plan: ShardingPlan, rows: Mapping[str, int]) -> tuple[Deployed, int]:
    """Put another plan to work on all ranks, with the rows and the state of the old one.

    Args:
        rows: other numbers of rows of dynamic tables, for which the plan is.
    Returns:
        What follows from the plan, and the bytes that this rank sent.
    Raises:
        PlanError: the plan does not fit the tables or the number of ranks.
        CommError: a peer is gone; the old shards are then still whole.
    """
    world = old.world
    iteration, rates = _agree(old)
    new = deploy(world.with_rows(rows), plan, old)
    sent = 0
    for table in new.world.tables:
        if table.name in rows:
            _resize(old, new, table)
        else:
            sent += _pass_on(old, new, table, world.optimizers[table.name])
    for lookup in new.lookups.values():
        lookup.iteration = iteration
        rate, base = rates[lookup.group.shards[0].table]
        lookup.set_learning_rate(rate)
        lookup.base_rate = None if base == -math.inf else base
    return new, sent


def _agree(old: Deployed) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return the number of updates, and for every table the learning rate as it is now and that
    which a schedule multiplies, or -inf.

    A rank may have had no shard of a table until now, and learns both from the others.
    """
    world, names = old.world, [table.name for table in old.world.tables]
    none, here = -math.inf, dict[str, tuple[float, float]]()
    for lookup in old.lookups.values():
        base = none if lookup.base_rate is None else lookup.base_rate
        here |= {shard.table: (lookup.learning_rate, base) for shard in lookup.group.shards}
    of_tables = [rate for name in names for rate in here.get(name, (none, none))]
    told = [float(old.iteration), *of_tables]
    box = torch.tensor(told, dtype=torch.float64, device=world.device)
    boxes = world.exchange.all_gather(box, [len(told)] * world.exchange.world_size).wait()
    iteration, *rates = torch.stack(list(boxes)).amax(0).tolist()
    pairs = zip(rates[::2], rates[1::2], strict=True)
    return int(iteration), dict(zip(names, pairs, strict=True))


def _pass_on(
    old: Deployed, new: Deployed, table: BaseEmbeddingConfig, optimizer: SparseOptimizer
) -> int:
    """Fill the new shards of one table; return the bytes that this rank sent."""
    world = old.world
    have = [state for state in old.shard_states() if state.shard.table == table.name]
    want = [state for state in new.shard_states() if state.shard.table == table.name]
    # a shard that stays in its memory has nothing to receive
    kept = {state.weight.data_ptr() for state in have}
    everyone = range(world.exchange.world_size)
    pieces, sent = pass_on(
        old.plan,
        new.plan,
        everyone,
        everyone,
        have,
        world.exchange,
        {table.name: columns_under(table, optimizer)},
        world.device,
    )
    fill([state for state in want if state.weight.data_ptr() not in kept], pieces)
    return sent


def _resize(old: Deployed, new: Deployed, table: BaseEmbeddingConfig) -> None:
    """Fill the new shards of a table with other rows from the old shards of the same blocks."""
    now = old.world.instants()[table.name]
    states = {state.shard: state for state in new.shard_states()}
    ids, fresh = old.dynamic_rows(), new.dynamic_rows()
    shards = [one.plan.tables[table.name].layout.shards(table.name) for one in (old, new)]
    twin = dict(zip(*shards, strict=True))
    for state in old.shard_states():
        if state.shard in twin:
            wanted = twin[state.shard]
            move_rows(table, state, states[wanted], now)
            fresh[wanted].tally = ids[state.shard].tally


def rows_to_grow(deployed: Deployed, names: Iterable[str] | None) -> dict[str, int]:
    """Return the rows that tables are to have whose present ones are mostly in use, by table; the
    same on all ranks, which call it together.

    Args:
        names: tables to look at; None takes all.
    """
    world, ids = deployed.world, deployed.dynamic_rows()
    now = world.instants()
    growing = [
        table
        for table in world.tables
        if table.dynamic is not None
        and table.dynamic.growth is not None
        and (names is None or table.name in names)
        and table.most_rows > table.num_embeddings
    ]
    if not growing:
        return {}
    held = torch.zeros(len(growing), dtype=torch.int64, device=world.device)
    for number, table in enumerate(growing):
        # column blocks and replicas know the same ids, so one of them speaks for its rows
        shards = deployed.plan.tables[table.name].layout.shards(table.name)
        speaks = {shard.rows: shard for shard in reversed(shards)}
        for shard in speaks.values():
            if shard in ids:
                held[number] += ids[shard].held(now[table.name])
    sizes = [len(growing)] * world.exchange.world_size
    total = torch.stack(list(world.exchange.all_gather(held, sizes).wait())).sum(0).tolist()
    grown = {}
    for table, count in zip(growing, total, strict=True):
        assert table.dynamic is not None and table.dynamic.growth is not None
        rows = table.dynamic.growth.next_rows(table.num_embeddings, count)
        if rows != table.num_embeddings:
            grown[table.name] = rows
    return grown
