"""The contents of a folder of predictions, checked before anything is scored.

It holds Parquet files of scores beside columns of the input, in the order of the input. The names
of the files, part-00000.parquet and so on, sort in the order of the rows. `scored_files` writes
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from rayrec.checks import is_uri, lasting_path
from rayrec.data.files import FileDataset
from rayrec.data.rows import RowDataset
from rayrec.errors import ConfigError, InputError
from rayrec.storage import one_line, probe_output

PART_ROWS = 262_144  # of a file
SCORE = "score"  # the column of a model with one task
Outputs = Sequence[tuple[str, str]]  # name and kind of every output; one task has no name


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """The files of predictions that were written.

    Attributes:
        path: absolute path of the folder.
        rows: of all files together.
        parts: number of files.
    """

    path: str
    rows: int
    parts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredFolder:
    """The folder of predictions and the columns beside the scores, checked by `scored_folder`.

    Attributes:
        path: absolute path of the folder.
        columns: names and types of the columns of the data that are copied.
        names: the columns of the scores, one for each output.
    """

    path: str
    columns: pa.Schema
    names: tuple[str, ...]


def scored_folder(
    out: str | os.PathLike[str], data: RowDataset, columns: Sequence[str], outputs: Outputs
) -> ScoredFolder:
    """Check where predictions shall go, before anything is scored.

    Args:
        out: a local folder, new or empty.
        columns: of the data, to be copied beside the scores.
        outputs: of the model.
    Raises:
        ConfigError: the folder is not empty, cannot be written to or lies among the data; the data
            do not lie in files; or two columns would have one name.
        InputError: a file has no such column, or it has other types in other files.
    """
    path = lasting_path("out", out)
    if not isinstance(data, FileDataset):
        raise ConfigError(
            "predictions are in the order of files, so they need a ParquetDataset or an "
            "ArrowDataset."
        )
    _check_out(path, data)
    names = tuple(name or SCORE for name, _ in outputs)
    for name in columns:
        if name in names:
            raise ConfigError(f"column {name!r} has the name of the scores; leave it out.")
        if columns.count(name) > 1:
            raise ConfigError(f"column {name!r} is named twice; leave it out once.")
    data.check_columns_exist(columns)
    types = _common_types(data, columns)
    probe_output("out (--out)", f"{path}/{part_name(0, 1)}")
    return ScoredFolder(path=path, columns=types, names=names)


def _check_out(path: str, data: FileDataset) -> None:
    """Check that a folder can become that of the predictions."""
    if is_uri(path):
        raise ConfigError(
            f"out (--out) {path} is on another file system, and a folder of predictions is written "
            "to a local disk. Name a local folder, and copy it from there."
        )
    real, root = os.path.realpath(path), os.path.realpath(data.path)
    # a data set lists its folder anew for every run, and would take the scores for rows
    if real == root or real.startswith(f"{root}{os.sep}"):
        raise ConfigError(
            f"out (--out) {path} lies among the data that the predictions are about, {data.path}, "
            "and would be read as data from then on. Name a folder elsewhere."
        )
    try:
        with os.scandir(real) as entries:
            names = sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(
            f"out (--out) {path} is a file, or lies in one; name a new folder."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"out (--out) {path} cannot be looked into: {one_line(error)}. Name a new folder."
        ) from None
    if names:
        raise ConfigError(
            f"out (--out) is the folder {path}, which holds {names[0]!r}"
            f"{' and more' if names[1:] else ''}; predictions go to a new or empty folder. Name "
            "another one, or empty it."
        )
    if os.path.ismount(real):
        raise ConfigError(
            f"out (--out) {path} is the root of a file system, whose place no other folder can "
            "take; name a folder in it."
        )


def _common_types(data: FileDataset, columns: Sequence[str]) -> pa.Schema:
    """Types of columns that hold the values of all files, where there are such types."""
    common = pa.schema([])
    for file in data.files if columns else ():
        own = data.open(file).schema
        mine = pa.schema([pa.field(name, own.field(name).type) for name in columns])
        try:
            common = pa.unify_schemas([common, mine], promote_options="permissive")
        except pa.ArrowException as error:
            raise InputError(
                f"the columns {list(columns)} have other types in {file.path!r} than in the files "
                f"before it: {one_line(error)}. Write all files with the same types, or leave the "
                "column out."
            ) from error
    return common


def part_name(number: int, parts: int) -> str:
    """Name of one of so many files; names sort as numbers do."""
    return f"part-{number:0{max(5, len(str(parts - 1)))}}.parquet"
