"""What a run tells of the ids of its dynamic tables beside the rows of one checkpoint.

The events of a run count ids that came and went. Which ids they were is not kept. But where a run
has three checkpoints, ids of the first that are not in the second have lost their row, and those of
them that are in the third should have kept it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rayrec.checkpoint import TableReader, read_manifest
from rayrec.dynamic.columns import NO_KEY, Ints
from rayrec.shards.state import IDS
from rayrec.storage import resolve
from rayrec.watch.events import files_of, read_events
from rayrec.watch.thinning import COUNTED


def id_counts(run: str, step: int) -> dict[str, Counter[str]]:
    """Return the counts of ids until a step by dynamic table; none where a folder has no events.

    Raises:
        InputError: a line of the events is broken.
    """
    if not files_of(*resolve(run)):
        return {}
    totals: dict[str, Counter[str]] = {}
    for window in read_events(run).of("window"):
        if window.step <= step:
            for table, counts in window.values["ids"].items():
                counted = {name: counts.get(name, 0) for name in COUNTED}
                totals.setdefault(table, Counter()).update(counted)
    return totals


def lost_ids(checkpoints: Sequence[str], table: str) -> dict[str, int] | None:
    """Return how many ids of a dynamic table lost their row too early.

    Args:
        checkpoints: three of one run, ascending by step.
    Returns:
        fields of `TableHealth`: ids that lost their row from the first to the second, and those of
        them that had one again in the third. None where there are fewer checkpoints, or one of
        them does not have the table as a dynamic one.
    """
    if len(checkpoints) < 3:
        return None
    keys = list[Ints]()
    for path in checkpoints:
        manifest = read_manifest(path)
        saved = manifest.table(table)
        if saved is None or saved.blocks is None:
            return None
        (column,) = TableReader(path, manifest).read_whole(table, [IDS])
        keys.append(column[column != NO_KEY].numpy())
    lost = np.setdiff1d(keys[0], keys[1])
    return {"lost_ids": len(lost), "returned_ids": int(np.isin(lost, keys[2]).sum())}
