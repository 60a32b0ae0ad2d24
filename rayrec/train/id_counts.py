"""How many ids of dynamic tables came and went, in a line for each table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from rayrec.distributed import DistributedModelParallel
from rayrec.train.window import gather_objects


def id_lines(model: DistributedModelParallel) -> list[str]:
    """Return a line for each dynamic table; all ranks call it together.

    Admissions, evictions and refusals are those since the ranks' processes made the model.
    """
    steps = model.id_steps
    if not steps:
        return []
    own: dict[tuple[str, int], Counter[str]] = {}
    for rows in model.dynamic_rows():
        # column blocks and replicas know the same ids, so one of them speaks for its rows
        if rows.shard.cols.start == 0:
            counts = Counter({"held": rows.held(steps[rows.table.name]), **asdict(rows.tally)})
            own[rows.table.name, rows.shard.rows.start] = counts
    parts: dict[tuple[str, int], Counter[str]] = {}
    for told in gather_objects(own):
        parts |= told
    total: dict[str, Counter[str]] = {}
    for (table, _), counts in parts.items():
        total.setdefault(table, Counter()).update(counts)
    return [
        f"table {table!r}: {counts['held']:,} ids have a row; {counts['admitted']:,} were "
        f"admitted, {counts['evicted']:,} evicted, {counts['refused']:,} refused for want of room"
        for table, counts in sorted(total.items())
    ]
