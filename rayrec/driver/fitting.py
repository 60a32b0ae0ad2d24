"""Training run of a driver: checks, run folder, start, work of the ranks, and result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rayrec.driver.attempts import Attempts, fit_task
from rayrec.driver.config import RunConfig
from rayrec.driver.display import Display
from rayrec.driver.planning import RunPlanner
from rayrec.driver.rank_group import Prepared
from rayrec.driver.ranks import Ranks
from rayrec.driver.result import Result, called, result_of
from rayrec.driver.run_folder import held
from rayrec.driver.run_log import RunLog
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.specs import (
    check_run,
    check_shape,
    check_values,
    local_files,
    run_info,
    total_steps,
    train_spec,
)
from rayrec.driver.start import find_start
from rayrec.errors import RunInterrupted
from rayrec.layout import Topology
from rayrec.layout.tables import refuse_growth
from rayrec.observe.profile_summary import check_folder
from rayrec.train.config import Dataset, TrainData
from rayrec.watch.event_log import with_event_log

if TYPE_CHECKING:
    from torch import nn

    from rayrec.train.own_loop import TrainLoop
    from rayrec.train.tasks import Scorer


def fit(
    model: Callable[[], nn.Module],
    data: TrainData,
    held_out: Dataset | None,
    run: RunConfig,
    scaling: ScalingConfig,
    scorer: Scorer | None,
    loop: TrainLoop | None,
    *,
    planning: RunPlanner,
    ranks: Ranks,
) -> Result:
    """Train, save, and score `held_out`; see `rayrec.Driver`, which has the arguments.

    Args:
        planning: makes the sharding plan for the ranks that were placed.
        ranks: ranks that run the training task.
    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.fit`.
    """
    check_values(data, run.tasks)
    check_values(held_out, run.tasks)
    check_run(run, scaling)
    check_shape(run, held_out, scorer, loop)
    display = Display(run.progress)
    log = RunLog(run.run_path, run.name)
    # The folder is taken before its checkpoints are looked at, so that no other driver changes
    # them in between.
    with (
        held(run.run_path, display.line) as folder,
        called(with_event_log(run.callbacks, run.run_path), display) as hooks,
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
        attempts = Attempts(run.run_path, start, display.line, points)

        def prepare(topology: Topology, hosts: Sequence[str]) -> Prepared:
            plan = planning.plan(topology)
            predicted = planning.predict(plan, topology)
            display.line(plan.report())
            info = run_info(run, plan, predicted, hosts, start, steps)
            spec = train_spec(
                run, model, plan, data=data, eval_data=held_out, steps=steps, start=start
            )
            return Prepared(fit_task(spec, scorer, loop), plan, predicted, info)

        files = [*local_files(data), *local_files(held_out)]
        try:
            ran = ranks.do(display, prepare, log, folder, {"data": files}, hooks, attempts)
        finally:
            attempts.end()
        result = result_of(ran, display)
        if result.hindsight is not None:
            display.line(result.hindsight.report())
    if hooks.error is not None:
        raise hooks.error
    if result.stopped and ran.signal_number is not None:
        raise RunInterrupted(ran.signal_number, result)
    return result
