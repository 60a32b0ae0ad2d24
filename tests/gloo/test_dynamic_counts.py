"""Counts of ids that come and go in the windows of a run, on one rank and on two."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rayrec.checkpoint import CheckpointManager, load_table
from rayrec.driver.planning import find_tables
from rayrec.layout import column_wise, data_parallel, row_wise
from rayrec.train import RankTrainer
from rayrec.train.events import Event, ProgressReport
from tests.dynamic_clicks import RULE, TABLE, write
from tests.gloo.dynamic_spec import HALF, STEPS, spec
from tests.ranks import RankPool
from tests.worlds import plan_for

KINDS = {"row_wise": row_wise, "column_wise": column_wise, "data_parallel": data_parallel}
NOW = ("rows", "held", "candidates")  # the others are sums
Told = tuple[list[dict[str, int]], list[str]]


def counted(rank: int, world_size: int, data: Path, folder: Path, kind: str) -> Told:
    """Counts of either half of the steps, and the lines of the end, under a plan of one kind."""
    whole = spec(data, world_size, folder)
    (table,) = find_tables(whole.model)
    plan = plan_for(world_size, {table.name: KINDS[kind](table, list(range(world_size)))})
    reports: list[ProgressReport] = []

    def hear(event: Event) -> None:
        if isinstance(event, ProgressReport):
            reports.append(event)

    with RankTrainer(replace(whole, plan=plan)) as trainer:
        trainer.begin()
        trainer.run(on_event=hear)
        lines = trainer.id_lines()
    halves: list[dict[str, int]] = []
    for end in (HALF, STEPS):
        part = [r.ids["t_user"] for r in reports if end - HALF < r.step <= end]
        sums = sum((Counter(ids) for ids in part), Counter[str]())
        halves.append({**sums, **{name: part[-1][name] for name in NOW}})
    return halves, lines


@pytest.mark.slow
def test_a_run_tells_the_same_counts_on_any_ranks(ranks: RankPool, tmp_path: Path) -> None:
    data = write(tmp_path / "data", TABLE | {"dynamic": RULE})
    halves, lines = told = counted(0, 1, data, tmp_path / "one", "row_wise")
    for kind in KINDS:
        assert ranks.run(2, counted, data, tmp_path / kind, kind) == [told, told]
    assert all(half[name] for half in halves for name in half if name != "refused")
    assert [half["rows"] for half in halves] == [TABLE["num_embeddings"]] * 2
    (line,) = lines
    for name in ("looked_up", "unknown", "admitted", "evicted", "refused"):
        assert f"{sum(half.get(name, 0) for half in halves):,}" in line
    path = CheckpointManager(str(tmp_path / "one")).path(STEPS)
    columns = load_table(path, "t_user").to_pydict()
    late = [
        key
        for key, seen in zip(columns["id_key"], columns["id_seen"], strict=True)
        if key != -1 and seen + RULE["ttl_steps"] >= STEPS
    ]
    assert halves[1]["held"] == len(late)
    assert f"{len(late)} ids have a row" in line
