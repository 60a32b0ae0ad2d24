"""Runs over windows in time: each is scored before it is trained on, alike on any ranks and after
any stop.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.data import ParquetDataset, TimeWindows, WindowedDataset
from rayrec.train import RankTrainer, TrainSpec
from rayrec.train.events import Evaluation
from tests.clicks import write_clicks
from tests.gloo.trainers import numbers, spec_of
from tests.ranks import RankPool

# rows by day; three, three, one and three steps of 128
ROWS = {3: 300, 4: 256, 6: 100, 9: 347}
STARTS = [0, 3, 5, 6]
Told = list[tuple[int | None, int, dict[str, float]]]


def write_days(folder: Path) -> None:
    write_clicks(folder)
    days = [day for day, rows in ROWS.items() for _ in range(rows)]
    # the days lie among each other in every file
    order = torch.randperm(len(days), generator=torch.Generator().manual_seed(0)).tolist()
    for file in sorted((folder / "train").glob("*.parquet")):
        table = pq.read_table(file)
        own = pa.array([days[order.pop()] for _ in range(table.num_rows)])
        pq.write_table(table.append_column("day", own), file)


def windowed(folder: Path, world_size: int) -> TrainSpec:
    spec = spec_of(folder, world_size)
    assert isinstance(spec.data, ParquetDataset)
    data = WindowedDataset(spec.data, TimeWindows(column="day"))
    steps = data.num_batches(spec.global_batch_size)
    assert data.first_batches(spec.global_batch_size) == [*STARTS, steps]
    return replace(spec, data=data, steps=steps)


def walked(rank: int, world_size: int, folder: Path) -> tuple[Told, dict[str, torch.Tensor]]:
    told: Told = []

    def keep(event: object) -> None:
        if isinstance(event, Evaluation):
            told.append((event.window, event.step, dict(event.scores)))

    with RankTrainer(windowed(folder, world_size)) as trainer:
        trainer.run(on_event=keep)
        return told, numbers(trainer.model)


def by_hand(rank: int, world_size: int, folder: Path) -> tuple[Told, dict[str, torch.Tensor]]:
    """Score a window and train on its rows, one data set after the other."""
    spec, told, path = windowed(folder, world_size), [], ""
    assert isinstance(spec.data, WindowedDataset)
    for step, window, end in zip(STARTS, spec.data.windows, [*STARTS[1:], spec.steps], strict=True):
        resume = (path,) if path else ()
        # the whole data, so that the rows come in the order of the run
        own = replace(spec, steps=end, resume_from=resume)
        with RankTrainer(own) as trainer:
            if path:
                trainer.restore(path)
            scores = trainer.evaluate(window.data)
            assert scores is not None
            told.append((window.start, step, scores))
            trainer.run()
            path = trainer.save(str(folder / f"{world_size}-by-hand-{end}"))
            found = numbers(trainer.model)
    return told, found


def test_each_window_is_scored_before_it_is_trained_on(ranks: RankPool, tmp_path: Path) -> None:
    write_days(tmp_path)
    told, found = ranks.run(1, walked, tmp_path)[0]
    assert [(window, step) for window, step, _ in told] == list(zip(ROWS, STARTS, strict=True))
    assert [scores["rows"] for *_, scores in told] == list(ROWS.values())
    by_steps, wanted = ranks.run(1, by_hand, tmp_path)[0]
    assert told == by_steps
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for others, tables in ranks.run(2, walked, tmp_path):
        for (window, step, scores), (_, _, same) in zip(told, others, strict=True):
            assert scores == pytest.approx(same, abs=2e-3), (window, step)
        for name in set(found) & set(tables):
            assert torch.allclose(found[name], tables[name], atol=1e-5), name


def stopped(rank: int, world_size: int, folder: Path, after: int, amid_scores: bool) -> Told:
    """Stop after some steps, or while the window there is scored, and go on on one rank."""
    told: Told = []
    phases = [""]

    def keep(event: object) -> None:
        if isinstance(event, Evaluation):
            told.append((event.window, event.step, dict(event.scores)))

    spec = replace(
        windowed(folder, world_size), run_path=str(folder / f"run-{after}-{amid_scores}"),
        report_every_s=1e-6,
    )  # fmt: skip
    with RankTrainer(spec, on_phase=phases.append) as trainer:

        def stop() -> bool:
            scoring = phases[-1] == "scoring the next window"
            return trainer.step >= after and (scoring or not amid_scores)

        assert trainer.run(should_stop=stop, on_event=keep)
        # nothing is kept before the first step
        assert trainer.step == after and bool(trainer.newest) == bool(after)
        spec = replace(spec, resume_from=(trainer.newest,) if trainer.newest else ())
    with RankTrainer(spec) as trainer:
        trainer.begin()
        trainer.run(on_event=keep)
    return told


@pytest.mark.parametrize(
    ("after", "amid_scores"), [(0, True), (2, False), (3, True), (3, False), (5, True), (6, True)]
)
def test_a_stop_changes_no_window(
    ranks: RankPool, tmp_path: Path, after: int, amid_scores: bool
) -> None:
    """Wherever it falls: a window that was not scored whole is scored when the run goes on."""
    write_days(tmp_path)
    wanted, _ = ranks.run(1, walked, tmp_path)[0]
    told = ranks.run(1, stopped, tmp_path, after, amid_scores)[0]
    assert told == wanted
