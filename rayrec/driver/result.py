"""What comes of a run: its result, its predictions, and what its callbacks hear of its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rayrec.checks import lasting_path
from rayrec.driver.config import Result
from rayrec.driver.display import Display
from rayrec.driver.prepared import Ran
from rayrec.errors import ConfigError
from rayrec.observe.hindsight import Hindsight
from rayrec.storage import probe_output
from rayrec.train.callbacks import Callback, Hooks
from rayrec.train.config import Dataset

if TYPE_CHECKING:
    from rayrec.train.outcome import FitOutcome
    from rayrec.train.predictions import PredictionConfig


def checked_predictions(
    path: str | None, keys: Sequence[str], scored: Dataset
) -> PredictionConfig | None:
    """Where the predictions of an evaluation go, checked before ranks start; None without any."""
    from rayrec.driver.specs import check_keys, check_outside
    from rayrec.train.predictions import PredictionConfig

    if path is None:
        if keys:
            raise ConfigError(
                f"keys={list(keys)} are columns of predictions; give predictions, too, or leave "
                "keys out."
            )
        return None
    config = PredictionConfig(path=lasting_path("predictions", path), keys=tuple(keys))
    check_keys(scored, keys)
    check_outside(scored, config.path)
    probe_output("predictions", config.path)
    return config


def result_of(ran: Ran, display: Display) -> Result:
    """What a user gets of a training that ran."""
    # Numbers are merged over the ranks, so that rank 0 speaks for all.
    outcome: FitOutcome = ran.results[0]
    plan = ran.prepared.plan
    assert plan is not None
    hindsight = Hindsight(ran.prepared.predicted, outcome.times) if outcome.times else None
    return Result(
        steps=outcome.steps,
        rows=outcome.rows,
        seconds=outcome.seconds,
        rows_per_s=outcome.rows / outcome.seconds if outcome.seconds else 0.0,
        train_loss=outcome.train_loss,
        metrics=outcome.metrics,
        checkpoint=outcome.checkpoint,
        plan=plan,
        stopped=outcome.stopped,
        milestones=tuple(display.milestones),
        reports=tuple(display.reports),
        hindsight=hindsight,
        profile=outcome.profile,
        evaluations=tuple(display.evaluations),
        best_step=outcome.best.step,
        best_score=outcome.best.value,
        ended_early=outcome.early,
    )


@contextmanager
def called(callbacks: Sequence[Callback], display: Display) -> Iterator[Hooks]:
    """Callbacks that are told of the end of what is done inside, and of the error that ended it."""
    hooks = Hooks(callbacks, "the driver")
    try:
        yield hooks
    except BaseException as error:
        hooks.end(error, display.step)
        raise
    hooks.end(None, display.step)
