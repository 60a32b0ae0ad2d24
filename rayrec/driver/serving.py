"""Uses of a checkpoint by a driver: evaluation, prediction of rows, and export of an artifact."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rayrec.checkpoint import checkpoint_path, read_manifest
from rayrec.checkpoint.manifest import MANIFEST
from rayrec.checks import is_uri, lasting_path
from rayrec.data import FileDataset, RowDataset
from rayrec.data.scored import scored_folder
from rayrec.driver.config import RunConfig
from rayrec.driver.planning import RunPlanner
from rayrec.driver.ranks import Files
from rayrec.driver.specs import check_values, local_files
from rayrec.driver.start import check_scored
from rayrec.errors import ConfigError
from rayrec.storage import probe_output
from rayrec.streams import schema_of
from rayrec.train.bulk import outputs_of
from rayrec.train.config import Dataset, TrainData
from rayrec.train.predictions import PredictionConfig
from rayrec.train.seat import RankTask
from rayrec.train.tasks import EvaluateTask, PredictTask

if TYPE_CHECKING:
    from torch import nn

    from rayrec.quant.types import Types
    from rayrec.serve import Manifest, ParityBounds


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Checked request for scores of a checkpoint, made before ranks start.

    Attributes:
        data: rows to score.
        task: (spec) -> the task of every rank.
        files: local files that every host must see, by their role.
    """

    data: Dataset
    task: Callable[..., RankTask]
    files: Files


def evaluation(
    planning: RunPlanner,
    run: RunConfig,
    checkpoint: str | None,
    data: Dataset | None,
    predictions: str | None,
    keys: Sequence[str],
) -> ScoreRequest:
    """Check what `Driver.evaluate` is given.

    Raises:
        ConfigError: there are no data, or predictions of them cannot be written there.
        InputError: the metadata of the files tell of a bad value, or lack a column.
        CheckpointError: it is missing, damaged, or of another model.
    """
    if data is None:
        raise ConfigError("Driver.evaluate needs data: pass it, or make the driver with eval_data.")
    wanted = _predictions(predictions, keys, data)
    check_values(data, run.tasks)
    files = {"data": local_files(data)}
    if checkpoint is not None:
        checkpoint = checkpoint_path("checkpoint", checkpoint)
        check_scored(checkpoint, planning.tables())
        files["checkpoint"] = manifest_file(checkpoint)
    task = partial(EvaluateTask, checkpoint=checkpoint, predictions=wanted)
    return ScoreRequest(data=data, task=task, files=files)


def prediction(
    planning: RunPlanner,
    run: RunConfig,
    checkpoint: str,
    data: Dataset | None,
    out: str,
    columns: Sequence[str],
) -> ScoreRequest:
    """Check what `Driver.predict` is given.

    Raises:
        ConfigError: there are no data, they do not lie in files, or `out` cannot be written.
        InputError: the metadata of the files tell of a bad value, or lack a column.
        CheckpointError: it is missing, damaged, or of another model.
    """
    if data is None:
        raise ConfigError("Driver.predict needs data: pass it, or make the driver with eval_data.")
    if not isinstance(data, RowDataset):
        raise ConfigError(
            f"data is a {type(data).__name__}; predictions are in the order of files, so they "
            "need a ParquetDataset or an ArrowDataset."
        )
    data = data.without_labels()
    folder = scored_folder(out, data, columns, outputs_of(run.tasks))
    check_values(data)
    path = checkpoint_path("checkpoint", checkpoint)
    files = {"data": local_files(data), "checkpoint": manifest_file(path)}
    check_scored(path, planning.tables())
    task = partial(PredictTask, checkpoint=path, folder=folder)
    return ScoreRequest(data=data, task=task, files=files)


def _predictions(path: str | None, keys: Sequence[str], data: Dataset) -> PredictionConfig | None:
    """Return the place of an evaluation's predictions, checked; None where none are wanted."""
    if path is None:
        if keys:
            raise ConfigError(
                f"keys={list(keys)} are columns of predictions; give predictions, too, or leave "
                "keys out."
            )
        return None
    config = PredictionConfig(path=lasting_path("predictions", path), keys=tuple(keys))
    if not isinstance(data, FileDataset):
        raise ConfigError(
            "predictions name files and rows, so they need a ParquetDataset or an ArrowDataset."
        )
    data.check_columns_exist(keys)
    root, target = os.path.realpath(data.path), os.path.realpath(config.path)
    # A data set lists its folder anew for every run, and would take the file for one of its own.
    inside = target.startswith(f"{root}{os.sep}") and target.endswith(data.SUFFIXES)
    if not is_uri(config.path) and (target == root or inside):
        raise ConfigError(
            f"predictions would be written to {config.path}, among the data that they are about, "
            f"{data.path}, and be read as data from then on. Name a file elsewhere."
        )
    probe_output("predictions", config.path)
    return config


def manifest_file(checkpoint: str) -> list[tuple[str, int]]:
    """Path and size of the manifest of a checkpoint on a local disk; empty for one in an object
    store.
    """
    path = f"{checkpoint}/{MANIFEST}"
    return [(path, os.path.getsize(path))] if os.path.isfile(path) else []


def export_checkpoint(
    run: RunConfig,
    model: Callable[[], nn.Module],
    checkpoint: str,
    out: str,
    types: Types,
    known: tuple[TrainData | None, ...],
    bounds: ParityBounds | None,
    compiled: bool,
) -> Manifest:
    """Export a checkpoint of a driver's model.

    Args:
        known: data given for this export, the driver's eval_data, and its training data. Of the
            first two, data in files are scored by both models; the first one that has a schema
            gives it.
    Raises:
        RayrecError: the errors of `rayrec.serve.export`.
    """
    from rayrec.serve import export
    from rayrec.serve.recipes import has_recipe

    if not isinstance(checkpoint, str):
        raise ConfigError(
            f"checkpoint is {checkpoint!r}; give the directory of one, such as Result.checkpoint "
            "of a run with a storage_path."
        )
    path = checkpoint_path("checkpoint", checkpoint)
    # The recipe in a checkpoint lets a predictor build the model without code of the user's.
    is_known = has_recipe(model, read_manifest(path).extras)
    schemas = [schema for schema in map(schema_of, known) if schema is not None]
    rows = next((data for data in known[:2] if isinstance(data, FileDataset)), None)
    return export(
        path,
        out,
        types=types,
        data=rows,
        model=None if is_known else model,
        schema=schemas[0] if schemas else None,
        tasks=run.tasks,
        bounds=bounds,
        compiled=compiled,
    )
