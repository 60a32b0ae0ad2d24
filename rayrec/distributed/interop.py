"""Rows in and out of a sharded model: pretrained tables, and a state_dict of the whole.

Every rank calls these; each reads or gives only its own rectangles. A whole table exists in memory
only where the user asks for one: in the tensor passed in, or on rank 0 for the export, table by
table.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm import plain
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.state import TableShards, whole_table
from rayrec.errors import ConfigError, InputError, ShapeError


@torch.no_grad()
def load_table(
    model: DistributedModelParallel, name: str, source: Tensor | str | os.PathLike[str]
) -> int:
    """Overwrite rows of one table, for example with pretrained ones; optimizer state stays.

    Args:
        source: a (num_embeddings, embedding_dim) tensor, or a Parquet, Arrow IPC or Feather file
            with a column `weight` of embedding_dim values per row (fixed-size list or list of
            floats) and, if it does not hold all rows in order, a column `row`.
    Returns:
        Rows that this rank wrote at least one column of.
    Raises:
        ConfigError: the table is dynamic.
        InputError: no such table; a file without the column, of another width, or with rows that
            the table does not have.
        ShapeError: a tensor of another shape.
    """
    states = [state for state in model.shard_states() if state.shard.table == name]
    if name not in model.plan.tables:
        raise InputError(
            f"the model has no table {name!r}; it has {', '.join(sorted(model.plan.tables)[:20])}."
        )
    if name in model.id_clocks:
        raise ConfigError(
            f"table {name!r} is dynamic: its rows belong to ids as they come, so rows by number "
            "cannot be copied in. Start from a checkpoint (init_from)."
        )
    rows, width = model.plan.tables[name].layout.shape
    if isinstance(source, Tensor):
        if tuple(source.shape) != (rows, width):
            raise ShapeError(
                f"table {name!r} is {rows} x {width}; the tensor is {tuple(source.shape)}."
            )
        return sum(_copy_all(state, source) for state in states)
    return _load_file(states, name, rows, width, os.fspath(source))


def _copy_all(state: ShardState, whole: Tensor) -> int:
    rows, cols = state.shard.rows, state.shard.cols
    state.weight.copy_(whole[rows.start : rows.stop, cols.start : cols.stop])
    return len(rows)


def _load_file(states: list[ShardState], name: str, rows: int, width: int, path: str) -> int:
    first = written = 0
    for batch in _batches(path):
        if "weight" not in batch.schema.names:
            raise InputError(
                f"{path} has columns {batch.schema.names}; the rows of table {name!r} are read "
                "from a column 'weight'."
            )
        column = batch.column("weight")
        values = torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy())
        if values.numel() != len(batch) * width:
            raise InputError(
                f"{path}: column 'weight' holds {values.numel()} values in {len(batch)} rows; "
                f"table {name!r} has {width} columns."
            )
        matrix = values.view(len(batch), width)
        index = torch.arange(first, first + len(batch))
        if "row" in batch.schema.names:
            numbers = batch.column("row").to_numpy(zero_copy_only=False)
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


def _batches(path: str) -> list[pa.RecordBatch]:
    try:
        if Path(path).suffix == ".parquet":
            return pq.read_table(path).to_batches()
        with pa.memory_map(path) as source:
            return pa.ipc.open_file(source).read_all().to_batches()
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
    named = model.module.named_modules()
    tables = {f"{path}.weight": child for path, child in named if isinstance(child, TableShards)}
    result: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if key not in tables:
            result[key] = value.detach().cpu() if isinstance(value, Tensor) else value
            continue
        # one table at a time, so that rank 0 holds no more than the result
        local = [ShardState(s.shard, s.weight.detach().cpu()) for s in tables[key].local()]
        gathered = plain.gather(local) if world > 1 else [local]
        if rank == 0:
            name = tables[key].name
            parts = [state for part in gathered for state in part]
            result[key] = whole_table(name, model.plan.tables[name].layout.shape, parts)
    return result if rank == 0 else None
