"""Pure functions that turn a user's options of a run into the spec of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rayrec.data import FileDataset
from rayrec.data.statistics import check_statistics
from rayrec.driver.config import RunConfig
from rayrec.driver.start import Start
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.spec.task import Task
from rayrec.train.config import Dataset, TrainSpec
from rayrec.train.scoring import binary_labels, check_columns_of_metrics

if TYPE_CHECKING:
    from torch import nn


def total_steps(run: RunConfig, data: Dataset, start: Start) -> int:
    """Global steps until the run ends, counted from the first step of the model's life.

    Raises:
        ConfigError: the data make no batch.
    """
    per_epoch = data.num_batches(run.global_batch_size, drop_last=run.drop_last)
    if per_epoch < 1:
        raise ConfigError(
            f"the data has {data.num_rows} rows, which make no batch of {run.global_batch_size} "
            f"with drop_last={run.drop_last}."
        )
    if run.steps is not None:
        return run.steps
    before = start.step if run.new_data else 0  # epochs of new data count from where they begin
    return before + per_epoch * (run.epochs or 0)


def train_spec(
    run: RunConfig,
    model: Callable[[], nn.Module],
    plan: ShardingPlan,
    *,
    data: Dataset | None = None,
    eval_data: Dataset | None = None,
    steps: int = 0,
    start: Start | None = None,
) -> TrainSpec:
    """Return the spec that every rank of a run is given."""
    return TrainSpec(
        **run.shared(),
        model=model,
        data=data,
        plan=plan,
        steps=steps,
        eval_data=eval_data,
        run_path=run.run_path,
        resume_from=start.resume_from if start is not None else (),
        profile=run.profile if data is not None else None,
    )


def local_files(data: Dataset | None) -> list[tuple[str, int]]:
    """Path and size of the data's files on this machine's disks; empty if there are none."""
    return data.local_files() if isinstance(data, FileDataset) else []


def check_values(data: Dataset | None, tasks: Sequence[Task] = ()) -> None:
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
