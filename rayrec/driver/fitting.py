"""Training run of a driver: checks, run folder, start, work of the ranks, and its `Result`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.driver.attempts import Attempts
from rayrec.driver.display import Display
from rayrec.driver.planning import RunPlanner
from rayrec.driver.rank_group import Prepared, Ran
from rayrec.driver.ranks import Ranks
from rayrec.driver.run_folder import held
from rayrec.driver.run_log import RunLog
from rayrec.driver.scaling_checks import check_run
from rayrec.driver.specs import (
    check_shape,
    check_values,
    local_files,
    run_info,
    total_steps,
    train_spec,
)
from rayrec.driver.start import find_start
from rayrec.errors import RunInterrupted, TrainingFailed
from rayrec.layout import ShardingPlan, Topology
from rayrec.layout.tables import refuse_growth
from rayrec.observe.hindsight import Hindsight
from rayrec.observe.profile_summary import Profile, check_folder
from rayrec.train.callbacks import Callback, Hooks
from rayrec.train.config import Dataset, TrainData
from rayrec.train.events import Evaluation, Milestone, ProgressReport
from rayrec.train.own_loop import LoopTask, TrainLoop
from rayrec.train.seat import RankTask
from rayrec.train.tasks import FitTask, Scorer
from rayrec.watch.event_log import with_event_log

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


def fit(
    planning: RunPlanner,
    ranks: Ranks,
    data: TrainData,
    held_out: Dataset | None,
    scorer: Scorer | None,
    loop: TrainLoop | None,
) -> Result:
    """Train, save, and score `held_out`; see `rayrec.Driver`, which has the arguments.

    Args:
        planning: makes the sharding plan for the ranks that were placed.
        ranks: ranks that run the training task.
    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.fit`.
    """
    ranks.begin()
    run = planning.run
    check_values(data, run.tasks)
    check_values(held_out, run.tasks)
    check_run(run, ranks.scaling)
    check_shape(run, held_out, scorer, loop)
    display = Display(run.progress)
    # The folder is taken before its checkpoints are looked at, so that no other driver changes
    # them in between.
    with (
        held(run.run_path, display.line) as folder,
        _called(with_event_log(run.callbacks, run.run_path), display) as hooks,
    ):
        if run.publish is not None:
            run.publish.check_tables(table.name for table in planning.tables())
        points = run.failure.sync_every_n_steps
        if points is not None:
            why = f"FailureConfig(sync_every_n_steps={points}) keeps rows in memory of one size"
            refuse_growth(planning.tables(), f"{why}; leave one of the two out")
        start = find_start(run, data, planning.tables, display.line)
        steps = total_steps(run, data, start)
        display.total_steps = steps
        if run.profile is not None:
            run.profile.check_steps(steps - start.step)
            check_folder(run.profile.path)
        attempts = Attempts(run.run_path, start, display.line, points, folder)

        def prepare(topology: Topology, hosts: Sequence[str]) -> Prepared:
            plan = planning.plan(topology)
            predicted = planning.predict(plan, topology)
            display.line(plan.report())
            info = run_info(run, plan, predicted, hosts, start, steps)
            spec = train_spec(
                planning, plan, data=data, eval_data=held_out, steps=steps, start=start
            )
            task: RankTask = FitTask(spec=spec, scorer=scorer)
            if loop is not None:
                task = LoopTask(spec=spec, loop=loop)
            return Prepared(task, plan, predicted, info)

        files = [*local_files(data), *local_files(held_out)]
        try:
            ran = ranks.do(
                display,
                prepare,
                log=RunLog(run.run_path, run.name),
                folder=folder,
                files={"data": files},
                hooks=hooks,
                attempts=attempts,
            )
        finally:
            attempts.end()
        result = _result_of(ran, display)
        if result.hindsight is not None:
            display.line(result.hindsight.report())
    if hooks.error is not None:
        raise hooks.error
    if result.stopped and ran.signal_number is not None:
        raise RunInterrupted(ran.signal_number, result)
    return result


def _result_of(ran: Ran, display: Display) -> Result:
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
def _called(callbacks: Sequence[Callback], display: Display) -> Iterator[Hooks]:
    """Callbacks that are told of the end of what is done inside, and of the error that ended it."""
    hooks = Hooks(callbacks, "the driver")
    try:
        yield hooks
    except BaseException as error:
        raised = hooks.error
        hooks.end(error, display.step)
        if raised is None or not isinstance(error, TrainingFailed):
            raise
        # the run was to end for it, and failed on the way
        raised.add_note(f"the run did not end well then: {error}")
        raise raised from raised.__cause__
    hooks.end(None, display.step)
