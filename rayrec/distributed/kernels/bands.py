"""Rows of equal width in one buffer, the bags that meet them in a step, and sums over bags: what
`TorchLookup` computes with.
"""

# B bags per slot, S slots of one width, N their ids, U touched rows, D width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.comm.pages import Allocate
from rayrec.distributed.kernels.parts import RowShare, take_share
from rayrec.distributed.kernels.slot_rows import SlotRows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import LookupGroup
from rayrec.layout import Shard
from rayrec.modules.names import DTYPES
from rayrec.sparse.ops import offsets_of


@dataclass(frozen=True)
class Band:
    """The slots of one width and their shards, rows below each other in one buffer.

    Attributes:
        weight: (rows, D) in the storage type.
        state: per state name (rows,) or (rows, D) float32.
        shards: each shard with its first row in the buffer.
        slots: indices of the group's slots, ascending.
        columns: first output column of each slot.
        first_rows: (S,) int64, the first buffer row of each slot's shard.
    """

    weight: Tensor
    state: dict[str, Tensor]
    shards: dict[Shard, int]
    slots: tuple[int, ...]
    columns: tuple[int, ...]
    first_rows: Tensor

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @cached_property
    def index_type(self) -> torch.dtype:
        """Type of row numbers: 32 bits, where they suffice, sort twice as fast as 64."""
        return torch.int32 if self.weight.shape[0] < 1 << 31 else torch.int64


@dataclass(frozen=True)
class BandBags:
    """Ids, weights and bags that one band reads in one step.

    Attributes:
        rows_N: rows of the band's buffer.
        offsets: (S * B + 1,).
        weights_N: weight of each id, or None.
        spans: positions of these ids among those of the group.
        slots: numbers of the band's slots that are read here, out of S.
        by_slot: True if gradients have the bags of a slot below each other, not the slots of
            a bag.
    """

    rows_N: Tensor
    offsets: Tensor
    weights_N: Tensor | None
    spans: tuple[slice, ...]
    slots: range
    all_slots: int
    by_slot: bool

    @property
    def bags(self) -> int:
        """Bags of each slot, B."""
        return (self.offsets.numel() - 1) // len(self.slots)

    def grad_row_N(self) -> Tensor:
        """Return for each id the row of its bag's gradient."""
        rows = torch.arange(
            self.all_slots * self.bags, device=self.offsets.device, dtype=self.rows_N.dtype
        )
        # (S, B) of row numbers: slot * B + bag, or bag * S + slot
        by_slot = (
            rows.view(self.all_slots, -1) if self.by_slot else rows.view(-1, self.all_slots).t()
        )
        rows = by_slot[self.slots.start : self.slots.stop].reshape(-1)
        return rows.repeat_interleave(self.offsets.diff(), output_size=self.rows_N.numel())

    def part(self, share: RowShare) -> BandBags:
        """Return the bags of a share of the slots, with the ids of its rows."""
        rows_N, offsets, weights_N = take_share(
            self.rows_N, self.offsets, self.weights_N, self.bags, share
        )
        return replace(
            self, rows_N=rows_N, offsets=offsets, weights_N=weights_N, spans=(), slots=share.slots
        )


def bands_of(
    group: LookupGroup, device: torch.device, space: TableSpace | None, allocate: Allocate
) -> tuple[Tensor, list[Band]]:
    """Return all rows in one flat buffer, and the bands that share it.

    There is a band for each width. Its shards lie below each other, as rows of its own view of the
    buffer, (rows, D); so an id becomes a row of the band when its shard's first row is added.
    Where rows lie in a `space`, a band sees all of that memory as rows of its width, and has state
    for all of them. State that nobody touches takes no memory.
    """
    widths = [slot.width for slot in group.slots]
    columns = offsets_of(widths)
    dtype = DTYPES[group.key.data_type]
    if space is None:
        values = sum(prod(shard.shape) for shard in group.shards)
        flat = _zeros(values, dtype, device, allocate)
    else:
        flat = space.rows
    bands: list[Band] = []
    used = 0
    for width in dict.fromkeys(widths):
        of_width = [shard for shard in group.shards if shard.shape[1] == width]
        if space is None:
            *firsts, rows = offsets_of(len(shard.rows) for shard in of_width)
            shards = dict(zip(of_width, firsts, strict=True))
            weight = flat[used : used + rows * width].view(rows, width)
            used += rows * width
        else:
            shards = {shard: space.starts[shard] // width for shard in of_width}
            weight = space.as_table(width)
            rows = weight.shape[0]
        slots = tuple(i for i, w in enumerate(widths) if w == width)
        first_rows = [shards[group.slots[i].shard] for i in slots]
        state = {
            name: _zeros(rows * width, torch.float32, device, allocate).view(rows, width)
            if per == "element"
            else _zeros(rows, torch.float32, device, allocate)
            for name, per in group.key.optimizer.state_widths.items()
        }
        first_columns = tuple(columns[i] for i in slots)
        first_rows_S = torch.tensor(first_rows, device=device)
        bands.append(Band(weight, state, shards, slots, first_columns, first_rows_S))
    return flat, bands


def _zeros(values: int, dtype: torch.dtype, device: torch.device, allocate: Allocate) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(values, dtype=dtype, device=device)
    return allocate(values * dtype.itemsize).view(dtype)


def slot_rows(
    group: LookupGroup, rows: Tensor, bands: Sequence[Band], workers: Workers
) -> SlotRows:
    """Tell FBGEMM's pooling where the rows of each slot lie in the flat buffer `rows`."""
    starts = {
        shard: int(band.weight.storage_offset()) + first * band.width
        for band in bands
        for shard, first in band.shards.items()
    }
    before = offsets_of(slot.shard.shape[0] for slot in group.slots)
    return SlotRows(
        rows,
        [starts[slot.shard] for slot in group.slots],
        before,
        [slot.width for slot in group.slots],
        workers,
    )


def shift(ids: Tensor, band: Band, bounds: Tensor) -> Tensor:
    """Return (N,) rows of the band's buffer, as `index_type`, for ids local to their shards.

    The ids of a single slot whose shard begins at row 0 are such rows already.

    Args:
        ids: (N,) of the band's slots, slot by slot.
        bounds: (S + 1,): where the ids of each slot begin, and their end.
    """
    rows = ids.to(band.index_type)
    if not ids.numel() or (band.first_rows.numel() == 1 and not next(iter(band.shards.values()))):
        return rows
    return rows + band.first_rows.to(band.index_type).repeat_interleave(
        bounds.diff(), output_size=ids.numel()
    )


def put_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write values to some rows of a table, in place.

    On CPU numpy writes each row as one piece, where torch's index_copy moves one element at a time.

    Args:
        table: (rows, D), or (rows,) for a state with one number per row.
        rows: (U,) int64; where one repeats, any of its values may stay.
        values: (U, D) or (U,), in the type of the table.
    """
    if (
        table.device.type == "cpu"
        and table.dim() == 2
        and table.numel()
        and table.is_contiguous()
        and values.is_contiguous()
    ):
        if table.dtype is torch.bfloat16:  # which numpy does not know
            table, values = table.detach().view(torch.int16), values.detach().view(torch.int16)
        # one opaque item per row, which numpy moves as a piece
        row = np.dtype((np.void, table.shape[1] * table.element_size()))
        table.detach().numpy().view(row)[rows.numpy(), 0] = values.detach().numpy().view(row)[:, 0]
    else:
        table.index_copy_(0, rows, values)


def bag_sums(table: Tensor, rows_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
    """Return (bags, D) float32: the (weighted) sum of each bag's rows of `table`, (rows, D)."""
    if not rows_N.numel():
        return torch.zeros(offsets.numel() - 1, table.shape[1], device=table.device)
    # widen the rows first: torch would sum a float16 table in float16
    if table.dtype != torch.float32:
        table = table[rows_N].float()
        rows_N = torch.arange(rows_N.numel(), device=table.device, dtype=rows_N.dtype)
    return functional.embedding_bag(
        rows_N,
        table,
        offsets.to(rows_N.dtype),
        mode="sum",
        per_sample_weights=weights_N,
        include_last_offset=True,
    )
