"""How the ids of dynamic tables come and go: in every window, and in a line for each at the end.

The numbers are those of the global batches, so they are the same on any number of ranks. A window
costs one gathering of some numbers, and a pass over the counts of the rows.
"""

from __future__ import annotations

from collections import Counter

from rayrec.distributed import DistributedModelParallel
from rayrec.train.window import gather_objects

_STATES = ("held", "candidates")  # numbers of a moment; all others are sums


class IdCounts:
    """Counts of a run's dynamic tables; all ranks call the same methods together."""

    def __init__(self) -> None:
        self._total: dict[str, Counter[str]] = {}

    def take(self, model: DistributedModelParallel) -> dict[str, dict[str, int]]:
        """Return the numbers of each dynamic table since the last call, by table and name.

        The names are those of `DynamicRows.take_counts`; "rows" is how many ids can have one.
        """
        clocks = model.id_clocks
        if not clocks:
            return {}
        own: dict[tuple[str, int], Counter[str]] = {}
        for rows in model.dynamic_rows():
            counts = rows.take_counts(clocks[rows.table.name])
            # column blocks and replicas know the same ids, so one of them speaks for its rows
            if rows.shard.cols.start == 0:
                counts["rows"] = len(rows.shard.rows)
                own[rows.table.name, rows.shard.rows.start] = Counter(counts)
        parts: dict[tuple[str, int], Counter[str]] = {}
        for told in gather_objects(own):
            parts |= told
        found: dict[str, Counter[str]] = {table: Counter() for table in sorted(clocks)}
        for (table, _), counted in parts.items():
            found[table].update(counted)
        for table, counted in found.items():
            total = self._total.setdefault(table, Counter())
            for name in _STATES:
                total[name] = 0
            total.update(counted)
        return {table: dict(counted) for table, counted in found.items()}

    def lines(self, model: DistributedModelParallel) -> list[str]:
        """Return a line for each dynamic table, of what happened since the ranks began."""
        self.take(model)
        return [
            f"table {table!r}: {counts['held']:,} ids have a row and {counts['candidates']:,} are "
            f"candidates; {counts['admitted']:,} were admitted, {counts['evicted']:,} evicted, "
            f"{counts['refused']:,} refused for want of room; {counts['unknown']:,} of "
            f"{counts['looked_up']:,} look-ups found no row"
            for table, counts in self._total.items()
        ]
