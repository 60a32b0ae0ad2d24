"""A run whose storage is slow says so, a run that reads faster than it trains does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.data import FileDataset
from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import write_synthetic
from rayrec.driver.display import Display
from rayrec.driver.hints import StarvationWatch
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.planner import manual_plan
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train import ProgressReport, RankTrainer, TrainSpec


@dataclass
class SlowDataset:
    """Files on storage that takes its time for every batch."""

    files: FileDataset
    seconds: float

    @property
    def num_rows(self) -> int:
        return self.files.num_rows

    def num_batches(self, global_batch_size: int, drop_last: bool = False) -> int:
        return self.files.num_batches(global_batch_size, drop_last)

    def loader(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with self.files.loader(*args, **kwargs) as batches:
            for batch in batches:
                time.sleep(self.seconds)
                yield batch


@dataclass
class ReadDataset(SlowDataset):
    """Batches that have been read before the run asks for them."""

    def loader(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with self.files.loader(*args, **kwargs) as batches:
            return iter(list(batches))


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    paths = write_synthetic(
        tmp_path_factory.mktemp("data"),
        SyntheticConfig(rows_train=2000, rows_eval=10, num_features=6, dim=4, cap=50),
    )
    recipe = ModelRecipe(
        model="dlrm", schema=paths.schema.read_text(), dense_layers=(8,), over_layers=(8,)
    )
    plan = manual_plan(find_tables(recipe), "table_wise", Topology.local(1))
    return TrainSpec(
        model=recipe,
        data=open_data(str(Path(paths.train)), recipe.schema),
        plan=plan,
        global_batch_size=100,
        steps=15,
    )


def shown(
    spec: TrainSpec, capsys: pytest.CaptureFixture[str], step_s: float
) -> tuple[list[ProgressReport], str]:
    """The reports of a run of short windows, whose steps take `step_s` longer than they need, and
    what a user sees of it.
    """
    display, reports = Display("plain", total_steps=spec.steps), list[ProgressReport]()

    def report(progress: ProgressReport) -> None:
        reports.append(progress)
        display.event(progress)

    with RankTrainer(replace(spec, report_every_s=0.02)) as trainer:
        trainer.run(on_event=report, on_step=lambda step: time.sleep(step_s))
    return reports, capsys.readouterr().out


def test_slow_storage_is_named_once_with_what_to_try(
    spec: TrainSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(spec.data, FileDataset)
    reports, out = shown(replace(spec, data=SlowDataset(spec.data, 0.05)), capsys, step_s=0.0)
    assert all(len(report.data_wait) == 1 and 0 <= report.data_wait[0] <= 1 for report in reports)
    said = [line for line in out.splitlines() if line.startswith("data: ")]
    assert len(said) == 1 and "rank 0 waited for batches" in said[0] and "ArrowDataset" in said[0]
    assert "waiting for data" in out


def test_storage_that_keeps_up_is_not_mentioned(
    spec: TrainSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(spec.data, FileDataset)
    reports, out = shown(replace(spec, data=ReadDataset(spec.data, 0.0)), capsys, step_s=0.1)
    assert len(reports) > 5 and "data: " not in out


def test_the_first_report_few_steps_and_another_world_do_not_count() -> None:
    watch = StarvationWatch()

    def see(step: int, *shares: float) -> str | None:
        return watch.see(
            ProgressReport(step=step, rows=step, rows_per_s=1.0, loss=0.5, data_wait=shares)
        )

    assert see(5, 0.9, 0.9) is None  # the first, after a resume
    assert see(7, 0.9, 0.9) is None  # two steps
    assert see(8, 0.9, 0.9, 0.9) is None  # another world
    assert see(20, 0.05, 0.09, 0.0) is None
    line = see(30, 0.05, 0.34, 0.2)
    assert (
        line is not None
        and "2 of 3 ranks, most of them rank 1, waited for batches 34% of the time of the last 10 "
        "steps"
        in line
    )
    assert see(40, 0.5, 0.5, 0.5) is None  # said a moment ago
