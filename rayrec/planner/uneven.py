"""Uneven cuts: a table gives rows or columns of its piece on the slowest rank to other pieces.

A piece's seconds rise with its size almost in a line, so the sizes that level the ranks under a
common ceiling are found by bisection from two prices; what they are worth is then priced anew and
counts only if the slowest rank gets faster. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from rayrec.layout.geometry import COLUMN_MULTIPLE, TableLayout
from rayrec.planner.candidates import Candidate
from rayrec.planner.costs import CostModel
from rayrec.planner.options import Option
from rayrec.planner.packing import Choice, Packing
from rayrec.planner.pricing import price_options
from rayrec.planner.work import TableWork

ROUNDS = 16
GAIN = 1e-3  # a new cut must make the slowest rank faster by that share
NEAR = 1.002  # times the lower bound: near enough


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis along which a table is cut; sizes are multiples of `unit`, at least `least`."""

    rows: bool
    unit: int
    least: int


class Recutter:
    """Prices layouts with cuts that no candidate has.

    Args:
        works: work of every table. min_partition: narrowest block of each, in columns.
    """

    def __init__(
        self, works: Sequence[TableWork], costs: CostModel, min_partition: Sequence[int | None]
    ) -> None:
        self._works, self._costs, self._min_partition = works, costs, min_partition

    def axis(self, tables: Sequence[int], choice: Choice) -> Axis | None:
        """The one axis along which a single table is cut in this choice, or None."""
        template = choice.option.candidates[0].template
        if len(tables) > 1 or not isinstance(template, TableLayout) or choice.option.num_ranks < 2:
            return None
        if template.num_col_blocks == 1:
            multiple = self._works[tables[0]].row_multiple
            return Axis(True, multiple, multiple)
        if template.num_row_blocks == 1:
            return Axis(False, COLUMN_MULTIPLE, self._min_partition[tables[0]] or COLUMN_MULTIPLE)
        return None

    def cut(self, table: int, choice: Choice, rows: bool, sizes: Sequence[int]) -> Choice:
        """The same ranks with pieces of other sizes, by position."""
        candidate = choice.option.candidates[0]
        template = candidate.template
        assert isinstance(template, TableLayout)
        cuts = (0, *accumulate(sizes))
        moved = replace(template, row_cuts=cuts) if rows else replace(template, col_cuts=cuts)
        work = replace(self._works[table], storage=choice.option.storages[0])
        (option,) = price_options(
            work, [Candidate(candidate.kind, moved, candidate.sites)], self._costs
        )
        return Choice(option, choice.ranks)


def even_out(packing: Packing, recutter: Recutter, bound: float) -> None:
    """Shift cuts until the slowest rank is near `bound`, or no shift helps.

    Args:
        packing: changed in place.
        bound: seconds that no packing can beat.
    """
    for _ in range(ROUNDS):
        before = packing.slowest
        if before <= bound * NEAR:
            return
        rank = packing.order()[-1]
        if not any(
            _shift(packing, recutter, item, before * (1 - GAIN))
            for item in sorted(packing.on_rank[rank])
        ):
            return


def _shift(packing: Packing, recutter: Recutter, item: int, goal: float) -> bool:
    """Level the ranks of one item; return True if the slowest of all takes less than `goal` then.

    Only an item of one table that is cut along one axis can be. Else the packing is left as it was.
    """
    tables, old = packing.items[item].tables, packing.choices[item]
    axis = recutter.axis(tables, old)
    if axis is None:
        return False
    template = old.option.candidates[0].template
    assert isinstance(template, TableLayout)
    sizes = [b - a for a, b in pairwise(template.row_cuts if axis.rows else template.col_cuts)]
    owners = [row[0] for row in template.owners] if axis.rows else list(template.owners[0])
    if owners != sorted(owners):  # pieces are in the order of positions
        return False
    # Loads without the item are where its new pieces start from.
    packing.take(item)
    lines = _lines(packing, recutter, tables[0], old, axis, sizes)
    wanted = _level([packing.loads[rank] for rank in old.ranks], lines, sum(sizes), axis)
    if wanted is not None and wanted != sizes:
        packing.put(item, recutter.cut(tables[0], old, axis.rows, wanted))
        if packing.slowest < goal and min(packing.free_bytes()) >= 0:
            return True
        packing.take(item)
    packing.put(item, old)
    return False


Line = tuple[float, float]  # seconds of nothing, seconds per unit of size


def _lines(
    packing: Packing,
    recutter: Recutter,
    table: int,
    choice: Choice,
    axis: Axis,
    sizes: Sequence[int],
) -> list[Line]:
    """Return each rank's seconds by the size of its piece, as a line through two prices.

    One is the price of today's piece, the other that of the largest or smallest possible piece.
    """
    total, count = sum(sizes), len(sizes)
    odd = total % axis.unit  # columns that only the last block may have
    other = [total - (count - 1) * axis.least - odd, *[axis.least] * (count - 2), axis.least + odd]
    options = _extremes(recutter, table, choice, axis, other)
    large, small = (packing.seconds_of(option, choice.ranks) for option in options)
    now = packing.seconds_of(choice.option, choice.ranks)
    lines = []
    for i, (size, seconds) in enumerate(zip(sizes, now, strict=True)):
        reference, at = (large[i], other[0]) if size <= other[-1] else (small[i], other[-1])
        # A slope below 0 is rounding: more rows take no less time.
        slope = max((seconds - reference) / (size - at), 0.0) if size != at else 0.0
        lines.append((seconds - slope * size, slope))
    return lines


def _extremes(
    recutter: Recutter, table: int, choice: Choice, axis: Axis, sizes: Sequence[int]
) -> tuple[Option, Option]:
    """Options whose seconds are those of the largest piece, or the smallest, at every position."""
    option = recutter.cut(table, choice, axis.rows, sizes).option
    large = {near: (values[0],) * len(values) for near, values in option.seconds.items()}
    small = {near: (values[-1],) * len(values) for near, values in option.seconds.items()}
    return replace(option, seconds=large), replace(option, seconds=small)


def _level(
    loads: Sequence[float], lines: Sequence[Line], total: int, axis: Axis
) -> list[int] | None:
    """Sizes that add up to `total` and level the ranks; None when a line is flat."""
    if any(slope <= 0 for _, slope in lines):
        return None

    def sizes_under(ceiling: float) -> list[float]:
        return [
            max((ceiling - load - start) / slope, axis.least)
            for load, (start, slope) in zip(loads, lines, strict=True)
        ]

    pairs = list(zip(loads, lines, strict=True))
    low = min(load + start for load, (start, _) in pairs)
    high = max(load + start + slope * total for load, (start, slope) in pairs)
    high = _bisect(low, high, lambda ceiling: sum(sizes_under(ceiling)) >= total)
    wanted = sizes_under(high)
    sizes = [max(int(size) // axis.unit * axis.unit, axis.least) for size in wanted]
    rest = total - sum(sizes)
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i] - wanted[i], i))
    # Those that rounding took most from come first when there is a rest, last when there is none.
    for turn in range(2 * len(sizes)):
        if abs(rest) < axis.unit:
            break
        i = order[turn % len(order)] if rest > 0 else order[-1 - turn % len(order)]
        step = axis.unit if rest > 0 else -axis.unit
        if sizes[i] + step >= axis.least:
            sizes[i] += step
            rest -= step
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    sizes[largest] += rest - rest % axis.unit
    sizes[-1] += rest % axis.unit
    return sizes if min(sizes) >= axis.least else None


def _bisect(low: float, high: float, enough: Callable[[float], bool]) -> float:
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
