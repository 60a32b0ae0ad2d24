"""`Result`: what comes back of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayrec.layout import ShardingPlan
from rayrec.observe.hindsight import Hindsight
from rayrec.report.profile_page import Profile
from rayrec.train.progress import Evaluation, Milestone, ProgressReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        steps: global steps done, counted from the first step of the model's life.
        rows, seconds, rows_per_s: of this run's training, without set-up, evaluation and saving.
        train_loss: mean loss of the last window of training.
        metrics: scores on eval_data after training (auc, ne, logloss, calibration, rows), or empty.
        checkpoint: newest checkpoint of the run, or None.
        plan: where the tables lay.
        stopped: the run ended early because it was asked to, after a last checkpoint where it has a
            storage_path.
        milestones: when the parts of the start-up were over, in order, up to the first step.
        reports: of every window of training, in order: loss, scores, rows per second. The first
            windows are short and slow.
        hindsight: predicted against measured seconds by rank and part; None on GPUs and in runs of
            one window.
        profile: of the steps that the run's `profile` names; None without, or when the run was
            stopped before.
        evaluations: in order, those on the way and the last one.
        best_step, best_score: of the best evaluation, by `EvaluationConfig.score`; None without.
        ended_early: why early stopping ended the run, or "".
        failures, recoveries: failures of ranks that the run survived, and how often it began again
            after them; two failures at once are recovered from together.
        seconds_lost: from the notice of a failure until the run was again at the step that it had
            reached, over all failures.
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
