"""Whole rows from the ranks that share them by columns.

A packed row has one scale for all of its columns. So the rank that has the first columns of some
rows packs them, and the others hand their columns over in files of the folder that all share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rayrec.layout.geometry import Shard
from rayrec.layout.plan import ShardingPlan
from rayrec.serve.chain.row_ranges import Changed
from rayrec.shards.copies import TouchedState
from rayrec.shards.state import IDS

PARTS = "parts"


def write_columns(hidden: Path, shards: Sequence[TouchedState]) -> None:
    """Write the columns of a rank that another one packs.

    Raises:
        OSError: the file system refuses.
    """
    (hidden / PARTS).mkdir(parents=True, exist_ok=True)
    for one in shards:
        if one.shard.cols.start:
            path = hidden / PARTS / _part_name(one.shard)
            np.save(f"{path}.rows.npy", one.rows.numpy())
            np.save(f"{path}.npy", one.weight.float().contiguous().numpy())


def gather_columns(
    hidden: Path, shards: Sequence[TouchedState], plan: ShardingPlan
) -> list[Changed]:
    """Join the rows of the shards that a rank packs with the columns that other ranks sent.

    Raises:
        OSError: the file system refuses.
    """
    changes = []
    for one in shards:
        if one.shard.cols.start:
            continue
        shared = plan.tables[one.shard.table].layout.shards(one.shard.table)
        others = [other for other in shared if other.rows == one.shard.rows and other.cols.start]
        values = [one.weight.float()]
        for other in sorted(others, key=lambda shard: shard.cols.start):
            path = hidden / PARTS / _part_name(other)
            rows = np.load(f"{path}.rows.npy")
            assert np.array_equal(rows, one.rows.numpy()), "columns of a row are touched together"
            values.append(torch.from_numpy(np.load(f"{path}.npy")))
        whole = values[0] if len(values) == 1 else torch.cat(values, dim=1)
        changes.append(Changed(one.shard, one.rows, whole, one.ids.get(IDS)))
    return changes


def _part_name(shard: Shard) -> str:
    name = hashlib.sha256(shard.table.encode()).hexdigest()[:16]
    return f"{name}-{shard.rows.start}-{shard.cols.start}"
