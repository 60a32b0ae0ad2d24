"""Inputs and outputs of a command: data sets, text files, and files for its result."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.checks import absolute_path, is_uri, lasting_path
from rayrec.errors import ConfigError, InputError
from rayrec.storage import probe_output

if TYPE_CHECKING:
    from rayrec.data import FileDataset


def open_data(
    path: str,
    schema: str,
    source: str = "the schema",
    where: str | None = None,
    with_labels: bool = True,
    num_streams: int | None = None,
) -> FileDataset:
    """Open a dataset of Parquet files, or of Arrow IPC files by their suffix.

    Args:
        schema: the JSON text of the schema.
        source: name of the schema in messages.
        where, with_labels, num_streams: see `FileDataset`.
    Raises:
        ConfigError: the schema contradicts itself, the path is empty, or num_streams is below 1.
        InputError: there is nothing to read, or there are files of both kinds.
    """
    from rayrec.data import ArrowDataset, FeatureSchema, ParquetDataset

    path = absolute_path("the data's path", path)
    names = [path]
    if not is_uri(path) and os.path.isdir(path):
        # Hidden names are looked for below the folder: the path to it may hold some.
        below = [p.relative_to(path) for p in sorted(Path(path).glob("**/*"))]
        hidden = re.compile(r"(^|/)[._]")  # data sets leave these out
        names = [str(p) for p in below if not hidden.search(str(p))]
    arrow = [name for name in names if name.endswith(ArrowDataset.SUFFIXES)]
    parquet = [name for name in names if name.endswith(ParquetDataset.SUFFIXES)]
    if arrow and parquet:
        raise InputError(
            f"{path} holds Parquet and Arrow files, such as {parquet[0]} and {arrow[0]}; a data "
            "set is of one kind. Move those of the other kind away."
        )
    kind = ArrowDataset if arrow else ParquetDataset
    parsed = FeatureSchema.from_json(schema, source)
    streams: dict[str, Any] = {} if num_streams is None else {"num_streams": num_streams}
    return kind(path, parsed, where=where, with_labels=with_labels, **streams)


def output_path(option: str, path: str | None) -> str | None:
    """Return the absolute path of a file that the job writes at its end, proven writable.

    Raises:
        ConfigError: it cannot be written, or would be deleted after the job.
    """
    if path is None:
        return None
    # hours of training must not end with a file that cannot be written
    whole = lasting_path(option, path)
    probe_output(option, whole)
    return whole


def read_text(option: str, path: str) -> str:
    """Return the text of the local file that an option names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {option} {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {option} {path} as text: {error}.") from None


def run_folder(path: str) -> tuple[str, str]:
    """Return the storage path and the name of a run for --checkpoint-dir.

    Raises:
        ConfigError: it would be deleted after the job, or names no folder.
    """
    whole = lasting_path("--checkpoint-dir", path)
    parent, _, name = whole.rpartition("/")
    if not name or parent.endswith(":/"):
        raise ConfigError(
            f"--checkpoint-dir {path} names no folder for the run; add one, such as {whole}/run."
        )
    return parent or "/", name


def rows_to_score(path: str) -> str:
    """Return a path of rows; of a folder that `rayrec make-data` wrote, its part eval/."""
    below = os.path.join(os.path.expanduser(path), "eval")
    is_made = os.path.isdir(below) and os.path.isfile(os.path.join(path, "schema.json"))
    return below if is_made and not is_uri(path) else path
