"""What ranks really take beside what the planner counts: real processes, after some steps."""

from __future__ import annotations

import multiprocessing as mp

import pytest

from benchmarks.memory import measure
from benchmarks.predicted import TableSet
from rayrec.layout import EmbeddingBagConfig, Topology
from rayrec.planner import manual_plan
from rayrec.planner.estimate import estimate_ranks


def tables_of(rows: int, dim: int, pooling: int, batch_size: int) -> TableSet:
    tables = tuple(EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"f{i}"]) for i in range(8))
    return TableSet(tables, (pooling,) * 8, batch_size)


@pytest.mark.parametrize(
    "tables, kind",
    [
        pytest.param(tables_of(60_000, 64, 2, 512), "table_wise", id="weights"),
        pytest.param(tables_of(1000, 128, 1, 4096), "row_wise", id="rows in exchange"),
        pytest.param(tables_of(1000, 16, 80, 2048), "column_wise", id="ids"),
    ],
)
def test_memory_is_what_the_planner_counts(tables: TableSet, kind: str) -> None:
    """Of the rank that took least: malloc may leave holes in a heap, and no formula knows where."""
    topology = Topology.local(2, memory_bytes=1 << 40)
    plan = manual_plan(tables.tables, kind, topology)
    predicted = min(rank.memory_bytes for rank in estimate_ranks(tables.request(topology), plan))
    measured = min(measure(mp.get_context("spawn"), tables, plan, 2))
    assert 0.75 * measured < predicted < 1.35 * measured, (predicted, measured)
