"""Result of a run, place of its predictions, and the end that its callbacks are told of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.driver.display import Display
from rayrec.driver.rank_group import Ran
from rayrec.layout import ShardingPlan
from rayrec.observe.hindsight import Hindsight
from rayrec.observe.profile_summary import Profile
from rayrec.train.callbacks import Callback, Hooks
from rayrec.train.events import Evaluation, Milestone, ProgressReport

if TYPE_CHECKING:
    from rayrec.train.outcome import FitOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Outcome of a training run.

    Attributes:
        steps: global steps done, counted from the first step of the model's life.
        rows, seconds, rows_per_s: amount and speed of training, without set-up, scoring and saving.
        train_loss: mean loss of the last window of training.
        metrics: scores on eval_data after training (auc, ne, logloss, calibration, rows), or empty.
        checkpoint: newest checkpoint of the run, or None.
        plan: sharding plan of the tables.
        stopped: the run ended early because it was asked to, after a last checkpoint where it has a
            storage_path.
        milestones: ends of the start-up's parts, in order, up to the first step.
        reports: one per window of training, in order: loss, scores, rows per second. The first
            windows are short and slow.
        hindsight: predicted against measured seconds by rank and part; None on GPUs and in runs of
            one window.
        profile: times of the steps that the run's `profile` names; None without, or when it was
            stopped before.
        evaluations: all evaluations in order, those of windows in time and the last one included.
        best_step, best_score: step and score of the best evaluation, by `EvaluationConfig.score`.
        ended_early: reason of early stopping, or "".
        failures, recoveries: failures of ranks that the run survived, and restarts of training
            after them; two failures at once are recovered from together.
        seconds_lost: seconds from the notice of a failure until the run was again at the step that
            it had reached, over all failures.
        resizes: number of changes of the number of ranks; `plan` is the plan after the last.
    """

    steps: int
    rows: int
    seconds: float
    rows_per_s: float
    train_loss: float | None
    metrics: Mapping[str, float]
    checkpoint: str | None
    plan: ShardingPlan
    stopped: bool = False
    milestones: tuple[Milestone, ...] = ()
    reports: tuple[ProgressReport, ...] = ()
    hindsight: Hindsight | None = None
    profile: Profile | None = None
    evaluations: tuple[Evaluation, ...] = ()
    best_step: int | None = None
    best_score: float | None = None
    ended_early: str = ""
    failures: int = 0
    recoveries: int = 0
    seconds_lost: float = 0.0
    resizes: int = 0


def result_of(ran: Ran, display: Display) -> Result:
    """Return the result of a training from the outcome of its ranks."""
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
        failures=len(ran.recovery.past),
        recoveries=ran.recovery.recoveries,
        seconds_lost=ran.recovery.seconds_lost,
        resizes=ran.resizes,
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
