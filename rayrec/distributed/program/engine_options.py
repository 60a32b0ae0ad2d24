"""Options of the exchange of sharded embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayrec.comm.codec import Codecs
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
