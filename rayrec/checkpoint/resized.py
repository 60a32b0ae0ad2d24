"""Restore of a dynamic table from one of another size, of other blocks, or that was not dynamic.

The rows of an id lie elsewhere then, so every rank reads the ids of the whole table, finds where
they belong, and takes the rows of its own. The ids of a table that was not dynamic are the numbers
of its rows, which nobody has counted.

    # P rows of the saved table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayrec.checkpoint.chain import Chain
from rayrec.checkpoint.entries import FileEntry, TableEntry
from rayrec.dynamic.clock import NO_TIME, Instant
from rayrec.dynamic.columns import NO_KEY, IdColumns
from rayrec.dynamic.resize import places_in
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.overlap import OverlapWriter
from rayrec.shards.state import HITS, IDS, SEEN, WEIGHT, ShardState

_KINDS = "id", "candidate"  # rows belong to ids; candidates have places of their own


def is_resized(table: BaseEmbeddingConfig, saved: TableEntry) -> bool:
    """Return True if a dynamic table was saved with another size or blocks, or was not dynamic."""
    if table.dynamic is None:
        return False
    now = table.num_embeddings, table.num_embeddings // table.row_multiple
    return now != (saved.num_embeddings, saved.blocks)


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
    assert table.dynamic is not None, "the table is dynamic"
    files, names = chain.base.files_by_table()[table.name], list(states[0].ids)
    saved = _columns(chain, table.name, files, names, verify)
    places, left_out = dict[str, Tensor](), 0
    for kind in _KINDS:
        if f"{kind}_key" in saved:
            of_kind = {one: saved.get(f"{kind}_{one}") for one in IdColumns._fields}
            own = IdColumns(**of_kind)  # type: ignore[arg-type]
            # candidates always make room by when they were seen
            eviction = table.dynamic.eviction if kind == "id" else "step"
            moved = places_in(table, own, eviction, now)
            places[kind] = torch.from_numpy(moved.places)
            left_out += moved.left_out if kind == "id" else 0
    for state in states:
        _clear(state)
        for name, column in state.ids.items():
            if name in saved:
                own_rows, chosen = _inside(places[name.split("_")[0]], state)
                column[own_rows] = saved[name][chosen]
    for entry in files:
        near = [state for state in states if _shares_columns(entry, state)]
        if not near:
            continue
        rectangle = chain.open(entry, verify=verify)
        for batch in range(len(entry.marks) - 1):
            rows = entry.batch_range(batch)
            here = places["id"][rows.start : rows.stop]
            if not (here >= 0).any():
                continue
            data = rectangle.read(batch)
            for state in near:
                own_rows, chosen = _inside(here, state)
                values = {WEIGHT: state.weight, **state.optimizer}
                part = {name: data[name][chosen] for name in values}
                writer.put_rows(own_rows, entry.cols, part, state, values)
    return left_out


def _columns(
    chain: Chain, table: str, files: Sequence[FileEntry], names: Sequence[str], verify: bool
) -> Mapping[str, Tensor]:
    """Read those of some (P,) columns that were saved of a table; times may not have been."""
    held = {column.name for column in files[0].columns}
    if IDS in held:
        wanted = [name for name in names if name in held]
        saved = chain.whole_columns(table, wanted, verify=verify)
    else:
        rows = torch.arange(max(entry.rows.stop for entry in files))
        none = torch.zeros(len(rows), dtype=torch.int32)
        saved = {IDS: rows, SEEN: none, HITS: none}
    for kind in _KINDS:
        name = f"{kind}_time"
        if name in names and f"{kind}_key" in saved:
            saved.setdefault(name, torch.full_like(saved[f"{kind}_key"], NO_TIME))
    return saved


def _inside(places: Tensor, state: ShardState) -> tuple[Tensor, Tensor]:
    """Return the rows of a shard that some places are, and which of the places these are."""
    rows = state.shard.rows
    (chosen,) = ((places >= rows.start) & (places < rows.stop)).nonzero(as_tuple=True)
    return places[chosen] - rows.start, chosen


def _shares_columns(entry: FileEntry, state: ShardState) -> bool:
    cols = state.shard.cols
    return entry.cols.start < cols.stop and cols.start < entry.cols.stop


def _clear(state: ShardState) -> None:
    for tensor in state.tensors().values():
        tensor.zero_()
    for kind in _KINDS:
        if f"{kind}_key" in state.ids:
            state.ids[f"{kind}_key"].fill_(NO_KEY)
