"""Options of the exchange of sharded embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayrec.comm.codec import Codecs
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.layout.tables import refuse_dynamic, refuse_growth
from rayrec.shards.named_memory import Memory


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine: its exchange, and the memory of its rows.

    Attributes:
        check_ids: check every id against its tables before it is sent; costs one pass over the ids.
        codecs: wire codecs of pooled rows and of their gradients.
        dedup_sequences: send every id of a sequence feature once per batch; see `dedup`.
        share_tables: ranks that share memory read each other's rows in place, where they can; see
            `in_place`.
        track_rows: keep for every row when it was last touched; see `rayrec.shards.touched`.
        memory: memory on the CPU for this rank's rows and the undo of their updates; None undoes
            nothing. See `rayrec.shards.undo`.
        adopt: go on with the rows that lie in `memory`.
        initialize: give rows their initial values; otherwise who made the model writes all of them.
        seed: seed of the first values of the rows of dynamic tables; `shard_embeddings` sets its
            own.
        averaged: the rows of several sharding groups are averaged now and then.
    """

    check_ids: bool = True
    codecs: Codecs = field(default_factory=Codecs)
    dedup_sequences: bool = False
    share_tables: bool = True
    track_rows: bool = False
    memory: Memory | None = None
    adopt: bool = False
    initialize: bool = True
    seed: int = 0
    averaged: bool = False


def check_dynamic(collections: Sequence[CollectionSpec], options: EngineOptions) -> None:
    """Refuse dynamic tables where their rows would be wrong.

    Raises:
        ConfigError: names the first dynamic table, what does not go with it, and what to do.
    """
    tables = [table for spec in collections for table in spec.tables]
    if options.averaged:
        refuse_dynamic(
            tables,
            "rows of sharding groups are averaged by number (sync_every above 1), where each group "
            "gives them to ids of its own; use sync_every=1",
        )
    if options.dedup_sequences:
        refuse_dynamic(
            tables,
            "ids are sent once per batch (dedup_sequences), and their counts decide who gets a "
            "row; leave it out",
        )
    if options.memory is not None:
        why = "the rows of sync points lie in memory (memory=) that keeps its size; leave it out"
        refuse_growth(tables, why)
