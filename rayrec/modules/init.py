"""Initial values of tables as a pure function of (seed, table name, row, column).

So a shard is born where it lives: any rectangle that any rank makes equals that rectangle of the
whole table, whatever the plan, and no rank ever holds the whole. The values come from the
counter-based Philox generator: its key is a stable hash of (seed, table name), its 256-bit counter
holds the row in the low 64 bits and the block of eight columns above them. One counter step gives
eight 32-bit numbers.

Cost: about 1.5 seconds per 100 M values on one core, and only for the columns asked for (rounded to
blocks of eight). Other distributions than the uniform one are those of a table's own `init_fn`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rayrec.errors import InputError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules.init_fn import InitProgram

_COLUMNS = 8  # 32-bit numbers per counter step of Philox 4x64
_CHUNK_ROWS = 1 << 15  # 1 MiB of random bits at a time: stays in cache


def _chunks(rows: range) -> Iterator[range]:
    for start in range(rows.start, rows.stop, _CHUNK_ROWS):
        yield range(start, min(start + _CHUNK_ROWS, rows.stop))


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


def _lanes(key: int, start: int, stop: int, cols: range) -> Iterator[tuple[slice, np.ndarray]]:
    """32 random bits of every element of some rows, by block of columns.

    Gives which columns of the result they are, and the bits as (rows, columns) uint32.
    """
    for block in range(cols.start // _COLUMNS, -(-cols.stop // _COLUMNS)):
        first = block * _COLUMNS
        # the counter of (row, block) is row + (block << 64): rows of a block follow each other
        generator = np.random.Philox(key=key, counter=start + (block << 64))
        bits = generator.random_raw((stop - start) * _COLUMNS // 2)
        left, right = max(cols.start, first), min(cols.stop, first + _COLUMNS)
        lanes = bits.view("<u4").reshape(stop - start, _COLUMNS)[:, left - first : right - first]
        yield slice(left - cols.start, right - cols.start), lanes


def table_values(seed: int, table: BaseEmbeddingConfig, rows: range, cols: range) -> Tensor:
    """The rectangle rows x cols of a table's initial values.

    Args:
        seed: any integer; the same on all ranks.
        table: its name picks the stream, its `init_bounds()` the uniform distribution, or its
            `init_fn` what is done.
        rows, cols: half-open, step 1, within the table.
    Returns:
        (len(rows), len(cols)) float32 on CPU.
    Raises:
        InputError: the rectangle is not within the table.
        ConfigError: the `init_fn` does what cannot be done for a part of a table.
    """
    spans = (("rows", rows, table.num_embeddings), ("cols", cols, table.embedding_dim))
    for what, span, size in spans:
        if span.step != 1 or not 0 <= span.start <= span.stop <= size:
            raise InputError(
                f"{what}={span} of table {table.name!r} are not a range of step 1 within [0, "
                f"{size})."
            )
    if table.init_fn is not None:
        return _play(InitProgram.record(table), seed, table, rows, cols)
    low, high = table.init_bounds()
    values = np.empty((len(rows), len(cols)), dtype=np.float32)
    key = _key(seed, table.name)
    scale, shift = np.float32((high - low) * 2.0**-24), np.float32(low)
    for chunk in _chunks(rows):
        out = values[chunk.start - rows.start : chunk.stop - rows.start]
        for columns, lanes in _lanes(key, chunk.start, chunk.stop, cols):
            part = out[:, columns]
            part[...] = lanes >> np.uint32(8)  # 24 bits fill a float32's mantissa
            part *= scale
            part += shift
        np.clip(out, low, high, out=out)  # scale * bits + shift may round beyond a bound
    return torch.from_numpy(values)


def _play(
    program: InitProgram, seed: int, table: BaseEmbeddingConfig, rows: range, cols: range
) -> Tensor:
    """The rectangle of a table with an `init_fn`."""

    def lanes(draw: int, rows: range, cols: range) -> np.ndarray:
        bits = np.empty((len(rows), len(cols)), dtype=np.uint32)
        # every draw of a table has a stream of its own
        key = _key(seed, f"{table.name}/{draw}")
        for columns, part in _lanes(key, rows.start, rows.stop, cols):
            bits[:, columns] = part
        return bits

    parts = [program.play(lanes, chunk, cols) for chunk in _chunks(rows)]
    return torch.cat(parts) if parts else torch.empty(0, len(cols))


def check_init_fn(table: BaseEmbeddingConfig) -> None:
    """Check that initial values can be made for any part of a table.

    Raises:
        ConfigError: the `init_fn` does what cannot be done for a part of a table.
    """
    if table.init_fn is not None:
        InitProgram.record(table)


def fill(
    weight: Tensor,
    seed: int,
    table: BaseEmbeddingConfig,
    rows: range | None = None,
    cols: range | None = None,
) -> None:
    """Write initial values into `weight` in place, a chunk of rows at a time.

    They are converted to its dtype and device.

    Args:
        weight: (len(rows), len(cols)); the whole table when `rows` and `cols` are None. A meta
            tensor is left alone.
        seed, table, rows, cols: as for `table_values`.
    """
    rows = range(table.num_embeddings) if rows is None else rows
    cols = range(table.embedding_dim) if cols is None else cols
    if tuple(weight.shape) != (len(rows), len(cols)):
        raise InputError(
            f"a weight of shape {tuple(weight.shape)} cannot hold rows {rows} and columns {cols} "
            f"of table {table.name!r}."
        )
    if weight.is_meta:
        return
    with torch.no_grad():
        for chunk in _chunks(rows):
            part = weight[chunk.start - rows.start : chunk.stop - rows.start]
            part.copy_(table_values(seed, table, chunk, cols))
