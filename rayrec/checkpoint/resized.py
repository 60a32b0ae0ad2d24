"""Restore of a dynamic table from one of another size, of other blocks, that kept another number of
candidates, or that was not dynamic.

The rows of an id lie elsewhere then, so every rank reads the ids of the whole table, finds where
they belong, and takes the rows of its own. The ids of a table that was not dynamic are the numbers
of its rows, which nobody has counted.

    # P rows of the saved table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayrec.checkpoint.chain import Chain, Rectangle
from rayrec.checkpoint.entries import FileEntry, TableEntry
from rayrec.dynamic.clock import NO_TIME, Instant
from rayrec.dynamic.columns import IdColumns, lanes_of
from rayrec.dynamic.kinds import KINDS
from rayrec.dynamic.resize import begin_anew, places_in, put_values
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.overlap import OverlapWriter, meet
from rayrec.shards.state import HITS, IDS, SEEN, ShardState


def is_resized(table: BaseEmbeddingConfig, saved: TableEntry) -> bool:
    """Return True if a dynamic table was saved with another size or blocks, kept another number of
    candidates, or was not dynamic.
    """
    if table.dynamic is None:
        return False
    blocks = table.num_embeddings // table.row_multiple
    if (table.num_embeddings, blocks) != (saved.num_embeddings, saved.blocks):
        return True
    candidates = table.dynamic.block_candidates(table.num_embeddings) * blocks
    return candidates not in (0, saved.counter_capacity or saved.num_embeddings)


def fill_resized(
    chain: Chain,
    table: BaseEmbeddingConfig,
    states: Sequence[ShardState],
    now: Instant,
    writer: OverlapWriter,
    *,
    verify: bool,
) -> int:
    """Fill the shards of one table, all of whose columns were saved; `writer` finishes them.

    Args:
        states: the shards, at least one.
        now: instant of the table when it was saved.
    Returns:
        the number of ids that have no row any more.
    Raises:
        CheckpointError, DamagedCheckpointError: the errors of `restore_checkpoint`.
    """
    files, names = chain.base.files_by_table()[table.name], list(states[0].ids)
    saved = _columns(chain, table.name, files, names, verify)
    places, known, left_out = dict[str, Tensor](), dict[str, IdColumns](), 0
    for kind in KINDS:
        own = IdColumns.of_lanes(kind, saved)
        if own is not None:
            moved = places_in(table, own, kind, now)
            places[kind], known[kind] = torch.from_numpy(moved.places), own
            left_out += moved.left_out if kind == "id" else 0
    begin_anew(states, places, known)
    for entry in files:
        near = [state for state in states if meet(entry.cols, state.shard.cols)]
        if not near:
            continue
        rectangle = Rectangle(chain, entry, verify=verify)
        for batch in range(len(entry.marks) - 1):
            rows = entry.batch_range(batch)
            here = places["id"][rows.start : rows.stop]
            if (here >= 0).any():
                put_values(here, entry.cols, rectangle.read(batch), near, writer)
    return left_out


def _columns(
    chain: Chain, table: str, files: Sequence[FileEntry], names: Sequence[str], verify: bool
) -> Mapping[str, Tensor]:
    """Read what was saved of some (P,) columns, in all lanes; times may not have been."""
    held = [column.name for column in files[0].columns]
    if IDS in held:
        lanes = {lane: kind for kind in KINDS for lane in lanes_of(kind, held)}
        wanted = [
            f"{lane}_{column}"
            for lane, kind in lanes.items()
            for column in IdColumns._fields
            if f"{kind}_{column}" in names and f"{lane}_{column}" in held
        ]
        saved = chain.whole_columns(table, wanted, verify=verify)
    else:
        rows = torch.arange(max(entry.rows.stop for entry in files))
        none = torch.zeros(len(rows), dtype=torch.int32)
        saved = {IDS: rows, SEEN: none, HITS: none}
    for kind in KINDS:
        for lane in lanes_of(kind, saved) if f"{kind}_time" in names else ():
            saved.setdefault(f"{lane}_time", torch.full_like(saved[f"{lane}_key"], NO_TIME))
    return saved
