"""Start of the run that a run file says, whatever its model and its data."""

from __future__ import annotations

from dataclasses import replace

from rayrec.driver.planning import check_plan_word
from rayrec.driver.scaling_checks import check_run, check_sizes
from rayrec.errors import ConfigError
from rayrec.next_item_recipe import NextItemModel
from rayrec.recipe import SEVERAL_TASKS, ModelRecipe
from rayrec.runs.next_item import train_next_item
from rayrec.runs.planted import planted_rows
from rayrec.runs.reporting import Reporting
from rayrec.runs.run_file import RunFile
from rayrec.runs.towers import TwoTowerModel, train_towers
from rayrec.runs.training import train_clicks


def train(settings: RunFile, reporting: Reporting) -> None:
    """Make the data where the run asks for it, train, score, and report.

    Raises:
        RayrecError, RunInterrupted: the errors of `train_clicks` and its kin.
        ConfigError: another model, or one of several tasks, is asked for with rows of clicks.
    """
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
    with planted_rows(planted, on_cluster, reporting.timing) as made:
        data = replace(
            settings.data,
            planted=None,
            train=str(made.train),
            eval=str(made.eval),
            schema=str(made.schema),
        )
        train_clicks(replace(settings, data=data), reporting)
