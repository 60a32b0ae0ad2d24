"""Predictions by an artifact, as the command line asks for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayrec.checks import absolute_path
from rayrec.errors import ConfigError
from rayrec.runs.inputs import made_part, open_data, read_text

if TYPE_CHECKING:
    from rayrec.data.scored import Predicted

_FORMAT = b'"rayrec.artifact"'
_HEAD_BYTES = 256  # the format is the first field of a manifest


def is_artifact(path: str) -> bool:
    """Return True if a local folder has the manifest of an artifact; that of a checkpoint names
    another format.
    """
    try:
        with open(os.path.join(os.path.expanduser(path), "manifest.json"), "rb") as file:
            return _FORMAT in file.read(_HEAD_BYTES)
    except (OSError, ValueError):
        return False


def predict_artifact(
    artifact: str,
    data: str,
    out: str,
    *,
    schema: str | None,
    where: str | None,
    columns: Sequence[str],
    workers: int,
    batch_size: int | None,
) -> Predicted:
    """Write the scores of rows by an artifact; see `rayrec.serve.predict_files`.

    Args:
        data: folder, file or URI of the rows, or a folder of `rayrec make-data`.
        schema: JSON file of the schema; None takes the artifact's.
        where: filter of the rows; None takes all.
        batch_size: number of rows scored at a time; None takes the default.
    Raises:
        RayrecError, RunInterrupted: the errors of `rayrec.serve.predict_files`.
        ConfigError: neither the artifact has a schema nor is there another one.
    """
    from rayrec.serve import predict_files
    from rayrec.serve.artifact import SCHEMA
    from rayrec.serve.bulk import BATCH_ROWS

    folder = absolute_path("ARTIFACT", artifact)
    own = os.path.join(folder, SCHEMA)
    if schema is None and not os.path.isfile(own):
        raise ConfigError(f"{folder} has no {SCHEMA}; give --schema, which says what columns are.")
    text = read_text("--schema", schema if schema is not None else own)
    rows = open_data(made_part(data, "eval"), text, schema or own, where, with_labels=False)
    return predict_files(
        folder,
        rows,
        out,
        columns=columns,
        workers=workers,
        batch_size=BATCH_ROWS if batch_size is None else batch_size,
    )
