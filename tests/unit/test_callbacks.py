"""Callbacks in the driver and on the ranks: what they hear, and how a run ends if one raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrec import Callback, EvaluationConfig
from rayrec.checkpoint import CheckpointManager
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver.display import Display
from rayrec.driver.fitting import _called
from rayrec.errors import CallbackError, ConfigError, InputError, TrainingFailed
from rayrec.train.callbacks import RunInfo
from rayrec.train.events import Evaluation, ProgressReport, Saved
from tests.clicks import TWELVE_STEPS, write_clicks
from tests.unit.local_runs import STEPS, driver


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SyntheticPaths:
    return write_clicks(tmp_path_factory.mktemp("clicks"), **TWELVE_STEPS | {"rows_eval": 301})


class Diary(Callback):
    """Notes every moment, and raises at one."""

    def __init__(self, raise_at: str = "", step: int = 0, error: Exception | None = None) -> None:
        self.notes: list[tuple[str, Any]] = []
        self.raise_at, self.step = raise_at, step
        self.error = error or ValueError("a bad hair day\nand more")

    def note(self, moment: str, value: Any, step: int = 0) -> None:
        self.notes.append((moment, value))
        if moment == self.raise_at and step >= self.step:
            raise self.error

    def of(self, moment: str) -> list[Any]:
        return [value for told, value in self.notes if told == moment]

    def on_start(self, info: RunInfo) -> None:
        self.note("start", info)

    def on_step(self, step: int, trainer: Any = None) -> None:
        self.note("step", step, step)

    def on_window(self, report: ProgressReport, trainer: Any = None) -> None:
        self.note("window", report, report.step)

    def on_evaluation(self, evaluation: Evaluation, trainer: Any = None) -> None:
        self.note("evaluation", evaluation, evaluation.step)

    def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
        self.note("checkpoint", saved, saved.step)

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        self.note("end", error)


def test_callbacks_hear_of_every_moment(data: SyntheticPaths, tmp_path: Path) -> None:
    diary, on_rank = Diary(), Diary()
    evaluation = EvaluationConfig(every_n_steps=5, rows=128)
    result = driver(
        data, tmp_path, callbacks=[diary], rank_callbacks=[on_rank], evaluation=evaluation
    ).fit()
    (info,) = diary.of("start")
    assert info.steps == STEPS and info.world_size == 1 and info.plan == result.plan
    assert info.hosts == ("localhost",)
    assert info.settings["evaluation"]["every_n_steps"] == 5
    assert on_rank.of("step") == list(range(1, STEPS + 1)) and on_rank.of("start") == []
    for own in (diary, on_rank):
        assert [s.step for s in own.of("checkpoint")] == [4, 8, 12]
        assert [(e.step, e.final) for e in own.of("evaluation")] == [
            (5, False),
            (10, False),
            (STEPS, True),
        ]
        assert own.of("window")[-1].step == STEPS and own.of("end") == [None]
        assert own.notes[-1][0] == "end"
    assert tuple(diary.of("evaluation")) == result.evaluations
    assert result.evaluations[-1].scores == result.metrics and result.metrics["rows"] == 301
    assert 0 < diary.of("window")[-1].memory_bytes[0] < 2**40


@pytest.mark.parametrize("moment", ["window", "evaluation", "checkpoint"])
def test_a_callback_of_the_driver_that_raises_ends_a_run_that_saves(
    data: SyntheticPaths, tmp_path: Path, moment: str
) -> None:
    diary, other = Diary(moment, step=5), Diary()
    evaluation = EvaluationConfig(every_n_steps=5, rows=128)
    run = driver(data, tmp_path, callbacks=[diary, other], evaluation=evaluation, steps=100_000)
    name = f"Diary.on_{moment} raised ValueError: a bad hair day in the driver after step"
    with pytest.raises(CallbackError, match=name) as caught:
        run.fit()
    assert isinstance(caught.value.__cause__, ValueError)
    (told,) = other.of("end")
    assert isinstance(told, CallbackError)
    newest = CheckpointManager(str(tmp_path / "run")).steps()[-1]
    assert 5 <= newest < 100_000


def test_a_callback_that_raises_is_named_also_where_the_ranks_fail_then(tmp_path: Path) -> None:
    """They were asked to stop for it, and did not in time."""
    diary = Diary("checkpoint")
    with (
        pytest.raises(CallbackError, match=r"Diary.on_checkpoint raised ValueError: a bad") as told,
        _called([diary], Display("off")) as hooks,
    ):
        hooks.event(Saved(step=4, path=str(tmp_path), seconds=1.0))
        raise TrainingFailed("the ranks were asked to stop and did not in 60 s")
    assert isinstance(told.value.__cause__, ValueError)
    assert told.value.__notes__ == [
        "the run did not end well then: the ranks were asked to stop and did not in 60 s"
    ]
    assert isinstance(diary.of("end")[0], TrainingFailed)


@pytest.mark.parametrize("moment", ["step", "window", "evaluation", "checkpoint"])
def test_a_callback_of_a_rank_that_raises_ends_a_run_that_saves(
    data: SyntheticPaths, tmp_path: Path, moment: str
) -> None:
    evaluation = EvaluationConfig(every_n_steps=5, rows=128)
    run = driver(
        data, tmp_path, rank_callbacks=[Diary(moment, 5)], evaluation=evaluation, steps=100_000
    )
    with pytest.raises(CallbackError, match=f"on_{moment} raised ValueError.* in rank 0 after"):
        run.fit()
    assert CheckpointManager(str(tmp_path / "run")).steps()[-1] >= 5


def test_a_callback_that_raises_at_the_start_or_at_the_end(data: SyntheticPaths) -> None:
    first = Diary("start")
    with pytest.raises(CallbackError, match="on_start raised ValueError: a bad hair day"):
        driver(data, callbacks=[first]).fit()
    assert first.of("window") == []
    with pytest.raises(InputError, match="mine"):  # a typed error says what it has to say itself
        driver(data, callbacks=[Diary("start", error=InputError("mine"))]).fit()
    last = Diary("end")
    with pytest.raises(CallbackError, match=r"on_end raised .* after step 12"):
        driver(data, callbacks=[last]).fit()
    assert last.of("end") == [None]


def test_what_cannot_be_evaluated_is_refused_before_training(data: SyntheticPaths) -> None:
    run = driver(data, evaluation=EvaluationConfig(every_n_steps=5, rows=302))
    with pytest.raises(ConfigError, match="rows=302, and the evaluation data have 301"):
        run.fit()
    run._eval_data = None
    with pytest.raises(ConfigError, match="no evaluation data: give the Driver"):
        run.fit()
    with pytest.raises(ConfigError, match=r"score='acu'|Give mode"):
        driver(data, evaluation=EvaluationConfig(every_n_steps=5, score="acu", keep_best=True))
    with pytest.raises(ConfigError, match=r"score='aucc', which is no score.* did you mean auc"):
        driver(data, evaluation=EvaluationConfig(every_n_steps=5, score="aucc", mode="max")).fit()
    with pytest.raises(ConfigError, match=r"keep_best=True\) saves checkpoints"):
        driver(data, evaluation=EvaluationConfig(every_n_steps=5, score="auc", keep_best=True))
    with pytest.raises(ConfigError, match="each item an instance of Callback"):
        driver(data, callbacks=[Diary])
