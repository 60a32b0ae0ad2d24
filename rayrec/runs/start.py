"""Start of the run that a run file says, whatever its model and its data."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rayrec.driver.planning import check_plan_word
from rayrec.driver.scaling_checks import check_run, check_sizes
from rayrec.errors import ConfigError
from rayrec.next_item_recipe import NextItemModel
from rayrec.recipe import SEVERAL_TASKS, ModelRecipe
from rayrec.runs.next_item import train_next_item
from rayrec.runs.reporting import Reporting
from rayrec.runs.retrieval import TwoTowerModel
from rayrec.runs.run_file import RunFile
from rayrec.runs.towers import train_towers
from rayrec.runs.training import train_clicks
from rayrec.train.events import Milestone

if TYPE_CHECKING:
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import SyntheticPaths


def train(settings: RunFile, reporting: Reporting) -> None:
    """Make the data where the run asks for it, train, score, and report."""
    planted = settings.data.planted
    if planted is None:
        if isinstance(settings.model, TwoTowerModel):
            train_towers(settings, reporting)
        elif isinstance(settings.model, NextItemModel):
            train_next_item(settings, reporting)
        else:
            train_clicks(settings, reporting)
        return
    if not isinstance(settings.model, ModelRecipe):
        raise ConfigError(
            f"{settings.source}: [data] planted makes rows for click models, and the model is "
            f"{settings.model.model!r}; give train, eval and schema."
        )
    if settings.model.model in SEVERAL_TASKS:
        raise ConfigError(
            f"{settings.source}: [data] planted makes rows of one label, and the model "
            f"{settings.model.model!r} predicts several tasks; give train, eval and schema."
        )
    # checked before rows are made and Ray starts: a run that cannot be costs nothing
    check_plan_word(settings.plan.plan)
    check_sizes(settings.plan.plan, settings.run, settings.scaling)
    check_run(settings.run, settings.scaling)
    on_cluster = settings.scaling.most > 0
    with _planted_rows(planted, on_cluster, reporting.timing) as made:
        data = replace(
            settings.data,
            planted=None,
            train=str(made.train),
            eval=str(made.eval),
            schema=str(made.schema),
        )
        train_clicks(replace(settings, data=data), reporting)


@contextmanager
def _planted_rows(
    config: SyntheticConfig, on_cluster: bool, timing: list[Milestone]
) -> Iterator[SyntheticPaths]:
    """Make rows with planted truth in a temporary folder, which is removed at the end.

    On a cluster Ray is started beside it, and stays connected. `timing` gets the milestones.
    """
    from rayrec.data.synthetic import check_room, write_synthetic
    from rayrec.driver.cluster import connected
    from rayrec.machine.signals import hold_signals

    def write() -> tuple[SyntheticPaths, Milestone]:
        return write_synthetic(folder, config), Milestone("data")

    print(f"making {config.rows_train} + {config.rows_eval} rows with planted truth", flush=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-data-"))
        check_room(folder, config)
        signals = stack.enter_context(hold_signals())
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(write)
            if on_cluster:
                stack.enter_context(connected())
                timing.append(Milestone("Ray cluster"))
        signals.check()
        paths, ready = made.result()
        timing.append(ready)
        yield paths
