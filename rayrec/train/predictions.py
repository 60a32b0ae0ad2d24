"""Predictions in a Parquet file: one row per row of the data, in the order of the files.

Every rank scores its part of each batch of rows in file order. Rank 0 gathers the parts, which lie
side by side in the batch, and appends them, so memory holds a few batches and the file needs no
sorting. The file appears under its name when it is complete.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from torch import Tensor

from rayrec.comm import plain
from rayrec.data.origin import RowOrigin
from rayrec.errors import ConfigError, InputError, SaveError
from rayrec.storage import one_line, resolve

COLUMNS = ("score", "label", "file", "row")
GROUP_ROWS = 131_072


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionConfig:
    """File of the predictions, and the columns beside each score.

    Attributes:
        path: absolute path or URI of the Parquet file.
        keys: columns of the data that are copied beside each score.
    Raises:
        ConfigError: a key has the name of a column that every such file has.
    """

    path: str
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Keys stand beside COLUMNS in one file, whose columns must have different names.
        for name in self.keys:
            if name in COLUMNS or self.keys.count(name) > 1:
                what = "is named twice"
                if name in COLUMNS:
                    what = "is a column of every prediction file"
                raise ConfigError(f"key column {name!r} {what}; leave it out.")


class PredictionWriter:
    """Writes one file; all ranks make one and call it together.

    Args:
        config: file to write, and the key columns.
        files: paths of the data's files, by the numbers that batches give.
        rank, world_size: index of this rank, and number of ranks; rank 0 writes.
    """

    def __init__(
        self, config: PredictionConfig, files: Sequence[str], rank: int, world_size: int
    ) -> None:
        self._config, self._files = config, pa.array(list(files), pa.string())
        self._rank, self._world_size = rank, world_size
        self._filesystem, self._path = resolve(config.path)
        local = isinstance(self._filesystem, fs.LocalFileSystem)
        self._folder = self._path.rpartition("/")[0]
        # of this writer alone: two that write one file at once would spoil each other's
        own = f"{self._folder}/.rayrec-{uuid.uuid4().hex[:8]}"
        self._partial = own if local else self._path
        self._makes_folder = local and rank == 0 and not os.path.isdir(self._folder)
        self._waiting: list[pa.Table] = []
        self._file: pq.ParquetWriter | None = None
        self._begun = False

    def add(self, scores: Tensor, labels: Tensor, origin: RowOrigin | None) -> None:
        """Append the rows of one batch.

        Args:
            scores: (B,) predicted probabilities of label 1.
            labels: (B,)
            origin: file and row number of the B rows; None when this rank's part has no rows.
        Raises:
            InputError: a key column has other types in other files.
            SaveError: the storage refuses.
        """
        mine = None if origin is None else self._table(scores, labels, origin)
        parts: list[Any] = [mine]
        # Ranks without rows of a batch send None, since the gather is a collective.
        if self._world_size > 1:
            parts = plain.gather(mine)
        self._waiting += [part for part in parts if part is not None and part.num_rows]
        if sum(part.num_rows for part in self._waiting) >= GROUP_ROWS:
            self._write()

    def finish(self) -> None:
        """Write the remaining rows and give the file its final name.

        Raises:
            SaveError: the storage refuses.
        """
        self._write()
        if self._file is None:
            return
        try:
            self._file.close()
            # On a local disk the rows lie in a hidden file until now. In an object store the file
            # appears when it is closed.
            if self._partial != self._path:
                os.replace(self._partial, self._path)
        except (OSError, pa.ArrowException) as error:
            raise self._refused(error) from error

    def abandon(self) -> None:
        """Remove what was written of an unfinished file."""
        if self._begun:
            with suppress(OSError, pa.ArrowException):
                if self._file is not None:
                    self._file.close()
            with suppress(OSError, pa.ArrowException):
                self._filesystem.delete_file(self._partial)
            if self._makes_folder:
                with suppress(OSError):
                    # removes only an empty folder
                    os.rmdir(self._folder)

    def _table(self, scores: Tensor, labels: Tensor, origin: RowOrigin) -> pa.Table:
        files = pa.DictionaryArray.from_arrays(pa.array(origin.file), self._files)
        columns = {
            "score": pa.array(scores.float().cpu().numpy()),
            "label": pa.array(labels.float().cpu().numpy()),
            "file": files,
            "row": pa.array(origin.row),
        }
        for name in self._config.keys:
            assert origin.columns is not None, "the loader was asked for the keys"
            columns[name] = origin.columns[name]
        return pa.table(columns)

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            table = pa.concat_tables(self._waiting, promote_options="permissive")
            # Each rank sent a dictionary of file names of its own; a Parquet column has one.
            table = table.unify_dictionaries()
            self._waiting = []
            if self._file is None:
                if self._makes_folder:
                    os.makedirs(self._folder, exist_ok=True)
                # in an object store nothing is there until it is open
                self._begun = self._partial != self._path
                self._file = pq.ParquetWriter(
                    self._partial, table.schema, filesystem=self._filesystem
                )
                self._begun = True
            self._file.write_table(table.cast(self._file.schema), row_group_size=GROUP_ROWS)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InputError(
                f"a key column of {list(self._config.keys)} has other types in other files: "
                f"{one_line(error)}. Write all files with the same types, or leave the column out."
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> SaveError:
        return SaveError(f"cannot write predictions to {self._config.path}: {one_line(error)}.")
