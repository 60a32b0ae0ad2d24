"""`TableMeasure`: numbers of one table, whose rows pass by once, part by part.

A part is some megabytes, and what is kept of it are counts, the largest values and a few sampled
rows. A norm is taken of every row. Only rows that look odd by it are looked at again; whether a row
is as it began is asked of eight columns first. So a pass costs little beside the check of the bytes
that were read.
"""

# R rows of a part, U of them in use, D width of the table

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rayrec.doctor.first_rows import FirstRows
from rayrec.doctor.tallies import ExampleCount, Float32Histogram, LargestValues
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.columns import NO_KEY
from rayrec.dynamic.known import known_keys
from rayrec.errors import InputError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.quant import QuantType, TableRange, pack_rows, unpack_rows
from rayrec.shards.state import IDS, SEEN, TIME, WEIGHT

SAMPLED = 2048  # rows whose rounding is measured
BEFORE_ALL = Instant()
_OF_IDS = ("id_", "candidate_")


class TableMeasure:
    """Numbers of the rows that were seen so far.

    Args:
        first: how the rows began; None where nobody knows.
        heat: column whose values say how often rows were used; None without one.
        now: instant of the table's ids; that before the first step without one.
        block_rows: rows of a block of a dynamic table.
        rules: the dynamic table; None where nobody knows when the time of its ids is over.
    """

    def __init__(
        self,
        first: FirstRows | None = None,
        heat: str | None = None,
        now: Instant = BEFORE_ALL,
        block_rows: int = 1,
        rules: BaseEmbeddingConfig | None = None,
    ) -> None:
        self._first, self._heat, self._now, self._rules = first, heat, now, rules
        self._stride, self._sample = 1, list[Tensor]()
        self._block_rows, self._per_block = block_rows, Counter[int]()
        self.in_use = self.idle = self.unmoved = self.began_otherwise = 0
        self.zero, self.nan, self.infinite = ExampleCount(), ExampleCount(), ExampleCount()
        self.dead, self.still_first = ExampleCount(), ExampleCount()
        self.norms, self.ages = Float32Histogram(), Float32Histogram()
        self.largest, self.hottest = LargestValues(), LargestValues()
        self.has_state = False

    @torch.no_grad()
    def add(self, rows: range, data: Mapping[str, Tensor]) -> None:
        """Count some rows by their numbers, each once; `data` is (R,) or (R, D) by column name."""
        names = torch.arange(rows.start, rows.stop)
        if IDS in data:
            keys = data[IDS]
            if self._rules is not None:
                keys = known_keys(self._rules, keys, data[SEEN], data.get(TIME), self._now)
            (used,) = (keys != NO_KEY).nonzero(as_tuple=True)
            blocks, counts = (names[used] // self._block_rows).unique(return_counts=True)
            self._per_block.update(dict(zip(blocks.tolist(), counts.tolist(), strict=True)))
            if len(used) < len(names):
                data = {name: column[used] for name, column in data.items()}
            names = data[IDS]
        if len(names):
            self._add_sizes(data[WEIGHT], names)
            self._add_changes(data, names)
            self._add_uses(data, names)
            self._add_sample(data[WEIGHT])
            self.in_use += len(names)

    def _add_sizes(self, weight: Tensor, names: Tensor) -> None:
        norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
        (odd,) = (~norms.isfinite()).nonzero(as_tuple=True)
        if len(odd):
            has_nan, has_inf = weight[odd].isnan().any(1), weight[odd].isinf().any(1)
            self.nan.add(names[odd[has_nan]])
            self.infinite.add(names[odd[has_inf & ~has_nan]])
            # squares of large numbers overflow
            norms[odd[~(has_nan | has_inf)]] = torch.finfo(torch.float32).max
            is_kept = norms.isfinite()
            weight, names, norms = weight[is_kept], names[is_kept], norms[is_kept]
        (small,) = (norms == 0).nonzero(as_tuple=True)
        if len(small):
            is_zero = _are_zero(weight[small])
            self.zero.add(names[small[is_zero]])
            is_kept = torch.ones(len(norms), dtype=torch.bool)
            is_kept[small[is_zero]] = False
            names, norms = names[is_kept], norms[is_kept]
        self.norms.add(norms)
        self.largest.add(norms, names)

    def _add_changes(self, data: Mapping[str, Tensor], names: Tensor) -> None:
        """Count rows that no gradient has reached, and those that are as they began."""
        untouched = _untouched(data)
        if untouched is not None:
            self.has_state = True
            self.dead.add(names[untouched])
        if self._first is None:
            return
        is_first = self._first.match(names, data[WEIGHT], untouched)
        self.still_first.add(names[is_first])
        if untouched is not None:
            self.unmoved += int((is_first & ~untouched).sum())
            self.began_otherwise += int((untouched & ~is_first).sum())

    def _add_uses(self, data: Mapping[str, Tensor], names: Tensor) -> None:
        if self._heat is not None:
            heat = data[self._heat]
            heat = heat.mean(1) if heat.dim() == 2 else heat
            self.hottest.add(heat.nan_to_num(0, 0, 0), names)
        if SEEN in data:
            ages = self._now.step - data[SEEN]
            self.ages.add(ages.clamp(min=0).float())
            self.idle += int((2 * ages > self._now.step).sum())

    def _add_sample(self, weight: Tensor) -> None:
        """Keep every nth of the rows in use; n doubles whenever there are enough."""
        taken = weight[(-self.in_use) % self._stride :: self._stride]
        # a view would keep all of the part in memory
        self._sample.append(taken.to(torch.float32, copy=True))
        while sum(map(len, self._sample)) > 2 * SAMPLED:
            self._sample = [torch.cat(self._sample)[::2].clone()]
            self._stride *= 2

    @property
    def full_blocks(self) -> int:
        """Blocks of a dynamic table whose rows are all in use."""
        return sum(count >= self._block_rows for count in self._per_block.values())

    def rounding(self, stored: QuantType) -> dict[str, Any]:
        """Return the error of a row in narrower types over its norm, the mean of many rows.

        They are packed as an export packs them. The names are those of the fields of `TableHealth`;
        a type that cannot hold the rows is left out.

        Args:
            stored: type of the rows.
        """
        errors = dict[str, Any]()
        if not self._sample:
            return errors
        rows = torch.cat(self._sample)
        norms = rows.double().norm(dim=1)
        is_sound = norms.isfinite() & (norms > 0)
        rows, norms = rows[is_sound], norms[is_sound]
        for kind in QuantType if len(rows) else ():
            if kind.value <= stored.value:
                continue
            span = TableRange("", kind)
            try:
                span.add(rows, 0)
            except InputError:
                continue
            power = span.power()
            packed = unpack_rows(pack_rows(rows, kind, power), kind, rows.shape[1], power)
            off = (packed.double() - rows.double()).norm(dim=1)
            errors[f"error_{kind.name.lower()}"] = float((off / norms).mean())
        return errors


def _are_zero(values: Tensor) -> Tensor:
    """Return (N,) bool, True for rows of zeros."""
    return (values.amax(1) == 0) & (values.amin(1) == 0)


def _untouched(data: Mapping[str, Tensor]) -> Tensor | None:
    """Return (U,) bool, rows whose state is zero, as at their start; None without state.

    A sum of squares that is not zero stays so. Means that decay reach zero after so many steps
    that rows are not touched any more by then.
    """
    states = [
        column for name, column in data.items() if name != WEIGHT and not name.startswith(_OF_IDS)
    ]
    if not states:
        return None
    untouched = torch.ones(len(states[0]), dtype=torch.bool)
    for state in states:
        untouched &= (state if state.dim() == 1 else state[:, 0]) == 0
    (places,) = untouched.nonzero(as_tuple=True)
    for state in states:
        if state.dim() == 2 and len(places):
            untouched[places] &= _are_zero(state[places])
    return untouched
