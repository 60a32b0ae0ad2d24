"""Rows in and out of a sharded model: pretrained tables, and a state_dict of the whole.

Every rank calls these; each reads or gives only its own rectangles. A whole table exists in memory
only where the user asks for one: in the tensor passed in, or on rank 0 for the export, table by
table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm import plain
from rayrec.distributed.load_ids import IdRows, load_ids, numbers_of
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.state import TableShards, whole_table
from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.fields.typed import check_argument


class LoadedRows(NamedTuple):
    """What `load_table` wrote.

    Attributes:
        written: rows that this rank wrote at least one column of.
        left_out: ids of a dynamic table, of all that were given, that have no row.
    """

    written: int
    left_out: int = 0


@torch.no_grad()
def load_table(
    model: DistributedModelParallel,
    name: str,
    source: Tensor | str | os.PathLike[str],
    *,
    ids: Tensor | None = None,
    ages: Tensor | None = None,
    hits: Tensor | None = None,
    optimizer: Mapping[str, Tensor] | None = None,
) -> LoadedRows:
    """Overwrite rows of one table, for example with pretrained ones; every rank must call it.

    The optimizer state of a table of numbered rows stays as it is. A dynamic table has the given
    ids alone afterwards, as far as its blocks have room: those stay that its eviction would take
    last, and ids whose time is over have no row.

    Args:
        source: a (num_embeddings, embedding_dim) tensor, or (N, embedding_dim) rows of a dynamic
            table; or a Parquet, Arrow IPC or Feather file with a column `weight` of embedding_dim
            values per row (fixed-size list or list of floats). If the file does not hold all rows
            in order, a column `row` numbers them. For a dynamic table it has a column `id`, and may
            have `age`, `hits` and one column for each state of the optimizer.
        ids: (N,) int64 of a dynamic table, each once; -1 is none. The numbers of the rows of
            another table may be ids.
        ages: (N,) training steps since each was seen, or seconds of the time of the data where the
            table goes by that; 0 unless given.
        hits: (N,) times that each was seen, 0 unless given.
        optimizer: state name -> (N,) row-wise or (N, embedding_dim); zeros unless given.
    Raises:
        ConfigError: the model or the source is none; ids and what is known of them for a table that
            is not dynamic, or beside a file; ages in seconds before the data has told a time.
        InputError: no such table; ids that are missing or repeated; other states than those of the
            optimizer; a file without the column, of another type or width, with a null, or with
            rows that the table does not have.
        ShapeError: a tensor of another shape.
    """
    check_argument("load_table", "model", model, DistributedModelParallel)
    check_argument("load_table", "source", source, Tensor | str)
    modules = model.module.modules()
    tables = {child.name: child for child in modules if isinstance(child, TableShards)}
    if name not in tables:
        raise InputError(
            f"the model has no table {name!r}; it has {', '.join(sorted(tables)[:20])}."
        )
    table = tables[name]
    of_ids = {"ids": ids, "ages": ages, "hits": hits, "optimizer": optimizer}
    given = [key for key, value in of_ids.items() if value is not None]
    if given and (table.config.dynamic is None or not isinstance(source, Tensor)):
        what = "is not dynamic" if table.config.dynamic is None else "is read from a file"
        raise ConfigError(
            f"table {name!r} {what}, and {given[0]} is for tensors of a dynamic table; leave it out"
            ", or give a table of numbered rows to one that is dynamic."
        )
    width = table.config.embedding_dim
    if table.config.dynamic is not None:
        if isinstance(source, Tensor):
            rows = IdRows(source, ids, ages, hits, optimizer or {})
        else:
            path = os.fspath(source)
            rows = IdRows.read(_read_file(path), path, width, table.local())
        return LoadedRows(*load_ids(table, rows, model.id_clocks[name]))
    shape = (table.config.num_embeddings, width)
    if isinstance(source, Tensor):
        if tuple(source.shape) != shape:
            raise ShapeError(
                f"table {name!r} is {shape[0]} x {width}; the tensor is {tuple(source.shape)}."
            )
        table.begin_overwrite()
        return LoadedRows(sum(_copy_all(state, source) for state in table.local()))
    table.begin_overwrite()
    return LoadedRows(_load_file(table.local(), name, *shape, os.fspath(source)))


def _copy_all(state: ShardState, whole: Tensor) -> int:
    rows, cols = state.shard.rows, state.shard.cols
    state.weight.copy_(whole[rows.start : rows.stop, cols.start : cols.stop])
    return len(rows)


def _load_file(states: list[ShardState], name: str, rows: int, width: int, path: str) -> int:
    first = written = 0
    for batch in _read_file(path).to_batches():
        if "weight" not in batch.schema.names:
            raise InputError(
                f"{path} has columns {batch.schema.names}; the rows of table {name!r} are read "
                "from a column 'weight'."
            )
        flat, _ = numbers_of(batch.column("weight"), f"{path}: column 'weight'")
        values = torch.from_numpy(flat.copy())
        if values.numel() != len(batch) * width:
            raise InputError(
                f"{path}: column 'weight' holds {values.numel()} values in {len(batch)} rows; "
                f"table {name!r} has {width} columns."
            )
        matrix = values.view(len(batch), width)
        index = torch.arange(first, first + len(batch))
        if "row" in batch.schema.names:
            numbers, is_list = numbers_of(batch.column("row"), f"{path}: column 'row'")
            if is_list:
                raise InputError(f"{path}: column 'row' has lists; it numbers one row in each.")
            index = torch.from_numpy(numbers.astype("int64"))
        first += len(batch)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < rows:
            bad = index[(index < 0) | (index >= rows)][0]
            raise InputError(f"{path} has row {int(bad)}; table {name!r} has rows 0 to {rows - 1}.")
        for state in states:
            shard = state.shard
            inside = (index >= shard.rows.start) & (index < shard.rows.stop)
            # of the rows of this batch, those of this rank's rectangle
            part = matrix[inside][:, shard.cols.start : shard.cols.stop].to(state.weight)
            state.weight[index[inside].to(state.weight.device) - shard.rows.start] = part
            written += int(inside.sum())
    return written


def _read_file(path: str) -> pa.Table:
    try:
        if Path(path).suffix == ".parquet":
            return pq.read_table(path)
        with pa.memory_map(path) as source:
            return pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(
            f"{path} cannot be read as Parquet (.parquet) or as an Arrow IPC file: {error}"
        ) from error


def unsharded_state_dict(model: DistributedModelParallel) -> dict[str, Any] | None:
    """Return the unsharded module's state_dict with whole tensors on the CPU, on rank 0; else None.

    Every rank must call it.

    `torch.save` of the result loads into the unsharded module, and
    `DistributedModelParallel.load_state_dict` takes it back.

    Raises:
        CommError: a peer is gone.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # a collection may have several names in the model, and then each key has the same tensor
    named = model.module.named_modules(remove_duplicate=False)
    tables = {f"{path}.weight": child for path, child in named if isinstance(child, TableShards)}
    result: dict[str, Any] = {}
    key_of: dict[TableShards, str] = {}
    for key, value in model.state_dict().items():
        if key not in tables:
            result[key] = value.detach().cpu() if isinstance(value, Tensor) else value
            continue
        if key_of.setdefault(tables[key], key) != key:
            if rank == 0:
                result[key] = result[key_of[tables[key]]]
            continue
        # one table at a time, so that rank 0 holds no more than the result
        local = [ShardState(s.shard, s.weight.detach().cpu()) for s in tables[key].local()]
        gathered = plain.gather(local) if world > 1 else [local]
        if rank == 0:
            name = tables[key].name
            parts = [state for part in gathered for state in part]
            result[key] = whole_table(name, model.plan.tables[name].layout.shape, parts)
    return result if rank == 0 else None
