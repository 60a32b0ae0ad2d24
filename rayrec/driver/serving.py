"""Uses of a checkpoint by a driver: prediction of rows, and export of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec.checkpoint import checkpoint_path, read_manifest
from rayrec.data import FileDataset, RowDataset
from rayrec.data.scored import ScoredFolder, scored_folder
from rayrec.driver.config import RunConfig
from rayrec.driver.ranks import Files
from rayrec.driver.specs import check_values, local_files, manifest_file
from rayrec.errors import ConfigError
from rayrec.recipe import ModelRecipe
from rayrec.train.config import Dataset

if TYPE_CHECKING:
    from torch import nn

    from rayrec.quant.types import Types
    from rayrec.serve import Manifest, ParityBounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Checked request for predictions, made before ranks start.

    Attributes:
        checkpoint: absolute directory or URI.
        data: rows to score, without labels.
        folder: folder that receives the scores.
        files: local files that every host must see, by their role.
    """

    checkpoint: str
    data: RowDataset
    folder: ScoredFolder
    files: Files


def checked_prediction(
    run: RunConfig, checkpoint: str, out: str, data: Dataset | None, columns: Sequence[str]
) -> Prediction:
    """Check what `Driver.predict` is given.

    Raises:
        ConfigError: there are no data, they do not lie in files, or `out` cannot be written.
        InputError: the metadata of the files tell of a bad value, or lack a column.
    """
    from rayrec.train.bulk import outputs_of

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
    return Prediction(checkpoint=path, data=data, folder=folder, files=files)


def export_checkpoint(
    run: RunConfig,
    model: Callable[[], nn.Module],
    checkpoint: str,
    out: str,
    types: Types,
    known: tuple[Dataset | None, ...],
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

    if not isinstance(checkpoint, str):
        raise ConfigError(
            f"checkpoint is {checkpoint!r}; give the directory of one, such as Result.checkpoint "
            "of a run with a storage_path."
        )
    path = checkpoint_path("checkpoint", checkpoint)
    # The recipe in a checkpoint lets a predictor build the model without code of the user's.
    has_recipe = isinstance(model, ModelRecipe) and "recipe" in read_manifest(path).extras
    schemas = [data.schema for data in known if isinstance(data, RowDataset)]
    rows = next((data for data in known[:2] if isinstance(data, FileDataset)), None)
    return export(
        path,
        out,
        types=types,
        data=rows,
        model=None if has_recipe else model,
        schema=schemas[0] if schemas else None,
        tasks=run.tasks,
        bounds=bounds,
        compiled=compiled,
    )
