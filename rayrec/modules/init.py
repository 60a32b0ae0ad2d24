"""Initial values of tables as a pure function of (seed, table name, row, column).

So a shard is born where it lives: any rectangle that any rank makes equals that rectangle of the
whole table, whatever the plan, and no rank ever holds the whole. The values come from the
counter-based Philox generator: its key is a stable hash of (seed, table name), its 256-bit counter
holds the row in the low 64 bits and the block of eight columns above them. One counter step gives
eight 32-bit numbers.

Cost: about 0.35 seconds per 100 M values on one core, half of it the generator, and only for the
columns asked for (rounded to blocks of eight). float32 values on CPU are written where they live, a
part at a time that stays in the cache. Other distributions than the uniform one are those of a
table's own `init_fn`.
"""

# R rows, C columns of a rectangle

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rayrec.errors import InputError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules.init_fn import InitProgram

_COLUMNS = 8  # 32-bit numbers per counter step of Philox 4x64
_BLOCK = "V32"  # the eight numbers of a counter step, moved as one
_CHUNK_VALUES = 1 << 17  # made at a time: with their bits 1 MiB, which stays in a core's cache
_TASK_VALUES = 1 << 22  # of one task: some milliseconds, so that threads end together

_Write = Callable[[Tensor, range, range], None]


def _parts(rows: range, width: int, values: int) -> Iterator[range]:
    """Yield parts of some rows, each of at most `values` values, or of one row."""
    step = max(1, values // width)
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


class _Bits:
    """32 random bits of every element of some columns, from one row on."""

    def __init__(self, key: int, start: int, cols: range) -> None:
        first = cols.start // _COLUMNS
        # the counter of (row, block) is row + (block << 64): rows of a block follow each other
        self._blocks = [
            np.random.Philox(key=key, counter=start + (block << 64))
            for block in range(first, -(-cols.stop // _COLUMNS))
        ]
        self._cols = slice(cols.start - first * _COLUMNS, cols.stop - first * _COLUMNS)

    def of_next(self, rows: int) -> np.ndarray:
        """Return the bits of the next rows, (R, C) uint32."""
        bits = np.empty((rows, len(self._blocks)), _BLOCK)
        for i, block in enumerate(self._blocks):
            bits[:, i] = block.random_raw(rows * _COLUMNS // 2).view(_BLOCK)
        return bits.view("<u4")[:, self._cols]


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
    values = torch.empty(len(rows), len(cols))
    fill(values, seed, table, rows, cols)
    return values


def _uniform(seed: int, table: BaseEmbeddingConfig) -> _Write:
    """Make the writer of any rectangle of a table without an `init_fn`."""
    key, (low, high) = _key(seed, table.name), table.init_bounds()
    scale, shift = np.float32((high - low) * 2.0**-24), np.float32(low)
    # values rise with the bits, so only the largest ones can be rounded beyond the bound
    beyond = np.float32(2**24 - 1) * scale + shift > np.float32(high)

    def write(weight: Tensor, rows: range, cols: range) -> None:
        bits = _Bits(key, rows.start, cols)
        in_place = weight.device.type == "cpu" and weight.dtype is torch.float32
        for chunk in _parts(rows, len(cols), _CHUNK_VALUES):
            part = weight[chunk.start - rows.start : chunk.stop - rows.start]
            values = part.numpy() if in_place else np.empty(part.shape, np.float32)
            drawn = bits.of_next(len(chunk))
            drawn >>= np.uint32(8)  # 24 bits fill a float32's mantissa
            # numpy has no quick way from unsigned numbers
            np.copyto(values, drawn.view(np.int32), casting="same_kind")
            values *= scale
            values += shift
            if beyond:
                np.minimum(values, np.float32(high), out=values)
            if not in_place:
                part.copy_(torch.from_numpy(values))

    return write


def _played(seed: int, table: BaseEmbeddingConfig) -> _Write:
    """Make the writer of any rectangle of a table with an `init_fn`."""
    program = InitProgram.record(table)

    def write(weight: Tensor, rows: range, cols: range) -> None:
        bits: dict[int, _Bits] = {}

        def lanes(draw: int, rows: range, cols: range) -> np.ndarray:
            if draw not in bits:
                # every draw of a table has a stream of its own
                bits[draw] = _Bits(_key(seed, f"{table.name}/{draw}"), rows.start, cols)
            return bits[draw].of_next(len(rows))  # chunks follow each other

        for chunk in _parts(rows, len(cols), _CHUNK_VALUES):
            part = weight[chunk.start - rows.start : chunk.stop - rows.start]
            part.copy_(program.play(lanes, chunk, cols))

    return write


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
    """Write initial values into `weight` in place; see `fills`."""
    with torch.no_grad():
        for task in fills(weight, seed, table, rows, cols):
            task()


def fills(
    weight: Tensor,
    seed: int,
    table: BaseEmbeddingConfig,
    rows: range | None = None,
    cols: range | None = None,
) -> list[Callable[[], None]]:
    """Tasks that together write initial values into `weight` in place, on any threads without
    autograd.

    Values are converted to its dtype and device.

    Args:
        weight: (len(rows), len(cols)); the whole table when `rows` and `cols` are None. A meta
            tensor is left alone.
        seed, table, rows, cols: as for `table_values`.
    Raises:
        InputError: the rectangle is not within the table, or `weight` has another shape.
        ConfigError: the `init_fn` does what cannot be done for a part of a table.
    """
    rows = range(table.num_embeddings) if rows is None else rows
    cols = range(table.embedding_dim) if cols is None else cols
    spans = (("rows", rows, table.num_embeddings), ("cols", cols, table.embedding_dim))
    for what, span, size in spans:
        if span.step != 1 or not 0 <= span.start <= span.stop <= size:
            raise InputError(
                f"{what}={span} of table {table.name!r} are not a range of step 1 within [0, "
                f"{size})."
            )
    if tuple(weight.shape) != (len(rows), len(cols)):
        raise InputError(
            f"a weight of shape {tuple(weight.shape)} cannot hold rows {rows} and columns {cols} "
            f"of table {table.name!r}."
        )
    if weight.is_meta or not weight.numel():
        return []
    weight = weight.detach()
    write = (_uniform if table.init_fn is None else _played)(seed, table)
    return [
        partial(write, weight[part.start - rows.start : part.stop - rows.start], part, cols)
        for part in _parts(rows, len(cols), _TASK_VALUES)
    ]
