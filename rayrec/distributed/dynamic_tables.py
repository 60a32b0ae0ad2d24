"""Dynamic tables of all ranks: what they cannot do yet, and which of them are to grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rayrec.distributed.deployed import Deployed
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.layout.tables import refuse_dynamic, refuse_growth


def check_dynamic(collections: Sequence[CollectionSpec], options: EngineOptions) -> None:
    """Refuse dynamic tables where their rows would be wrong.

    Raises:
        ConfigError: names the first dynamic table, what does not go with it, and what to do.
    """
    tables = [table for spec in collections for table in spec.tables]
    for holds, why in (
        (
            options.averaged,
            "rows of sharding groups are averaged by number (sync_every above 1), where each group "
            "gives them to ids of its own; use sync_every=1",
        ),
        (
            options.dedup_sequences,
            "ids are sent once per batch (dedup_sequences), and their counts decide who gets a "
            "row; leave it out",
        ),
    ):
        if holds:
            refuse_dynamic(tables, why)
    if options.memory is not None:
        why = "the rows of sync points lie in memory (memory=) that keeps its size; leave it out"
        refuse_growth(tables, why)


def rows_to_grow(deployed: Deployed, names: Iterable[str] | None = None) -> dict[str, int]:
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
