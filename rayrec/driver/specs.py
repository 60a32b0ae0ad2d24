"""Options of a run: their checks that need no cluster, and what ranks and callbacks get of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rayrec.data import FileDataset, WindowedDataset
from rayrec.data.statistics import check_statistics
from rayrec.driver.config import RunConfig
from rayrec.driver.planning import RunPlanner
from rayrec.driver.start import Start
from rayrec.errors import ConfigError
from rayrec.fields.misfit import meant
from rayrec.fields.writing import json_data
from rayrec.layout import ShardingPlan
from rayrec.layout.estimates import RankEstimate
from rayrec.spec.schedule import ScheduleConfig
from rayrec.spec.task import Task
from rayrec.streams import StreamDataset
from rayrec.train.callbacks import RunInfo
from rayrec.train.config import ENDLESS, Dataset, TrainData, TrainSpec
from rayrec.train.own_loop import TrainLoop
from rayrec.train.scoring import binary_labels, check_columns_of_metrics, check_tasks
from rayrec.train.tasks import Scorer


def check_shape(
    run: RunConfig, eval_data: Dataset | None, scorer: Scorer | None, train_loop: TrainLoop | None
) -> None:
    """Check tasks, metrics and evaluations against each other and the evaluation data.

    Raises:
        ConfigError: there is nothing to evaluate, a sample is too large, or a metric cannot be
            merged.
    """
    names = check_tasks(run.tasks)
    if train_loop is not None:
        _check_loop(run, scorer)
    if run.evaluation is None:
        return
    score = run.evaluation.score
    if score is not None and score not in names:
        raise ConfigError(
            f"EvaluationConfig has score={score!r}, which is no score of this run"
            f"{meant(score, sorted(names))}"
        )
    if scorer is not None:
        raise ConfigError(
            "the Driver has a scorer, which scores after training alone, and RunConfig has "
            "evaluation=...; leave one of them out."
        )
    if eval_data is None:
        raise ConfigError(
            "RunConfig has evaluation=..., and there are no evaluation data: give the Driver "
            "eval_data."
        )
    rows = run.evaluation.rows
    if rows is not None and rows > eval_data.num_rows:
        raise ConfigError(
            f"EvaluationConfig has rows={rows}, and the evaluation data have {eval_data.num_rows}; "
            "leave rows out to score all of them."
        )


def _check_loop(run: RunConfig, scorer: Scorer | None) -> None:
    """Refuse options that only the ready-made loop obeys."""
    defaults = {f.name: f.default for f in fields(run)}
    theirs = ("sparse_schedule", "dense_schedule", "clip_norm", "clip_value", "accumulate")
    given = [name for name in theirs if getattr(run, name) != defaults[name]]
    if run.dense_dtype == "bfloat16":
        given.append("dense_dtype")
    if run.profile is not None:
        given.append("profile")
    if scorer is not None:
        given.append("scorer")
    if given:
        raise ConfigError(
            f"{given[0]} is obeyed by the ready-made loop, and the Driver has a train_loop: do it "
            "in the loop, or leave it out."
        )


def check_values(data: TrainData | None, tasks: Sequence[Task] = ()) -> None:
    """Refuse ids and labels that the files' metadata show to be bad, and data without columns that
    metrics need, before ranks start.

    Args:
        tasks: tasks of the run, which set the range of labels; none means one binary task.
    Raises:
        InputError: names the first bad entry by row and file, or the column.
    """
    check_columns_of_metrics(tasks, data)
    if isinstance(data, FileDataset):
        check_statistics(data, binary_labels(tasks, data))


def check_stream(run: RunConfig, data: StreamDataset) -> None:
    """Refuse what does not go with a stream, whose windows lie in the run's folder.

    Raises:
        ConfigError: the run keeps nothing, begins its windows anew, sums gradients over windows, or
            needs to know its end.
    """
    if run.run_path is None or not run.checkpoint.at_end:
        raise ConfigError(
            f"the run reads {data.config.source_name} as a stream, whose place is kept with its "
            "checkpoints; give RunConfig(storage_path=...) and leave CheckpointConfig(at_end=True)."
        )
    if run.new_data:
        raise ConfigError(
            "new_data=True begins the data anew, and windows of a stream lie in the run's folder; "
            "leave it out, or start a new run from the weights with init_from."
        )
    if run.epochs not in (None, 1):
        raise ConfigError(
            f"RunConfig has epochs={run.epochs}, and a stream is walked once; leave it out."
        )
    if run.accumulate > 1:
        raise ConfigError(
            f"RunConfig has accumulate={run.accumulate}, and windows of a stream begin at any "
            "step, also amid a sum of gradients; leave one of them out."
        )
    for what in ("sparse_schedule", "dense_schedule"):
        said = getattr(run, what)
        if run.steps is None and isinstance(said, ScheduleConfig) and said.decay != "constant":
            raise ConfigError(
                f"RunConfig has {what} with decay={said.decay!r}, which falls until the last step, "
                "and a stream has none; give steps, or leave the decay out."
            )
    if any(one.history is not None for one in data.schema.features):
        raise ConfigError(
            "the schema cuts histories from an event log, which is sorted by user, and a stream "
            "comes by time; give lists of the past with each row."
        )


def total_steps(run: RunConfig, data: TrainData, start: Start) -> int:
    """Global steps until the run ends, counted from the first step of the model's life.

    Raises:
        ConfigError: the data make no batch.
    """
    if isinstance(data, StreamDataset):
        check_stream(run, data)
        return run.steps or ENDLESS
    per_epoch = data.num_batches(run.global_batch_size, drop_last=run.drop_last)
    if per_epoch < 1:
        raise ConfigError(
            f"the data has {data.num_rows} rows, which make no batch of {run.global_batch_size} "
            f"with drop_last={run.drop_last}."
        )
    before = start.step if run.new_data else 0  # epochs of new data count from where they begin
    if isinstance(data, WindowedDataset):
        _check_windows(run, before + per_epoch)
    if run.steps is not None:
        return run.steps
    return before + per_epoch * (run.epochs or 0)


def _check_windows(run: RunConfig, most: int) -> None:
    """Refuse what does not go with windows in time, which are walked once."""
    if run.epochs not in (None, 1) or (run.steps or 0) > most:
        said = f"epochs={run.epochs}" if run.steps is None else f"steps={run.steps}"
        raise ConfigError(
            f"RunConfig has {said}, and windows in time are walked once, up to step {most}; give "
            "epochs=1."
        )
    if run.accumulate > 1:
        raise ConfigError(
            f"RunConfig has accumulate={run.accumulate}, and windows in time begin at any step, "
            "also amid a sum of gradients; leave one of them out."
        )


def train_spec(
    planning: RunPlanner,
    plan: ShardingPlan,
    *,
    data: TrainData | None = None,
    eval_data: Dataset | None = None,
    steps: int = 0,
    start: Start | None = None,
) -> TrainSpec:
    """Return the spec that every rank of a run is given."""
    run = planning.run
    return TrainSpec(
        **run.shared(),
        model=planning.model,
        data=data,
        plan=plan,
        steps=steps,
        eval_data=eval_data,
        run_path=run.run_path,
        resume_from=start.resume_from if start is not None else (),
        profile=run.profile if data is not None else None,
    )


def local_files(data: TrainData | None) -> list[tuple[str, int]]:
    """Path and size of the data's files on this machine's disks; empty if there are none."""
    return data.local_files() if isinstance(data, FileDataset) else []


def run_info(
    run: RunConfig,
    plan: ShardingPlan,
    predicted: tuple[RankEstimate, ...],
    hosts: Sequence[str],
    start: Start,
    steps: int,
) -> RunInfo:
    """Return the facts that callbacks receive as training begins; `hosts` has each rank's host."""
    return RunInfo(
        name=run.name,
        run_path=run.run_path,
        steps=steps,
        first_step=start.step,
        world_size=len(hosts),
        hosts=tuple(hosts),
        plan=plan,
        settings={f.name: json_data(getattr(run, f.name)) for f in fields(run)},
        predicted=predicted,
    )
