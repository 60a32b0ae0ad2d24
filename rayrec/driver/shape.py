"""What shapes a run, checked before anything is started, and what callbacks are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches

from rayrec.driver.config import RunConfig, ScalingConfig
from rayrec.driver.start import Start
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.layout.estimates import RankEstimate
from rayrec.train.callbacks import RunInfo
from rayrec.train.config import Dataset
from rayrec.train.on_the_way import check_sample
from rayrec.train.own_loop import TrainLoop
from rayrec.train.scoring import check_tasks
from rayrec.train.tasks import Scorer
from rayrec.watch.schema import plain


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
        near = get_close_matches(score, names, 1)
        hint = f"did you mean {near[0]!r}? They" if near else "they"
        raise ConfigError(
            f"EvaluationConfig has score={score!r}, which is no score of this run; {hint} are "
            f"{', '.join(sorted(names))}."
        )
    if scorer is not None:
        raise ConfigError(
            "the Driver has a scorer, which scores after training alone, and RunConfig has "
            "evaluation=...; leave one of them out."
        )
    check_sample(run.evaluation.rows, eval_data)


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


def check_recovery(run: RunConfig, scaling: ScalingConfig) -> None:
    """Refuse recovery where no process can be replaced.

    Raises:
        ConfigError: the one rank is this very process.
    """
    if run.failure.max_failures and not scaling.num_workers:
        raise ConfigError(
            f"FailureConfig has max_failures={run.failure.max_failures}, and num_workers=0 runs "
            "the one rank in this process, which cannot be replaced; leave it out, or give "
            "num_workers."
        )


def run_info(
    run: RunConfig,
    plan: ShardingPlan,
    predicted: tuple[RankEstimate, ...],
    hosts: Sequence[str],
    start: Start,
    steps: int,
) -> RunInfo:
    """What callbacks are told when training begins; `hosts` has the host of each rank."""
    return RunInfo(
        name=run.name,
        run_path=run.run_path,
        steps=steps,
        first_step=start.step,
        world_size=len(hosts),
        hosts=tuple(hosts),
        plan=plan,
        settings={f.name: plain(getattr(run, f.name)) for f in fields(run)},
        predicted=predicted,
    )
