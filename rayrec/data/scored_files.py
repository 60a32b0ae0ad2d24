"""Writes a folder of predictions: files of scores, and the folder that appears when it is whole.

The files are written into a hidden folder beside the one that is wanted, which takes its name when
all of them are complete. So a folder of that name is whole, whatever ended the writing. In memory
are the rows of one row group.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from rayrec.data.scored import ScoredFolder
from rayrec.errors import InputError, SaveError
from rayrec.storage import one_line

GROUP_ROWS = 131_072


@contextmanager
def _saving(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make a SaveError of what the storage says, with the path in it."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise SaveError(f"cannot write predictions to {path}: {one_line(error)}.") from error


class PartWriter:
    """Writes one file of a folder.

    Args:
        path: of the file.
    Attributes:
        rows: that were added.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._file: pq.ParquetWriter | None = None
        self.rows = 0

    def add(self, rows: pa.Table) -> None:
        """Append rows as `scored_rows` makes them.

        Raises:
            SaveError: the storage refuses.
        """
        self._waiting.append(rows)
        self.rows += rows.num_rows
        self._waiting_rows += rows.num_rows
        if self._waiting_rows >= GROUP_ROWS:
            self._write()

    def close(self) -> None:
        """Write what is left.

        Raises:
            SaveError: the storage refuses.
        """
        self._write()
        if self._file is not None:
            with _saving(self._path):
                self._file.close()

    def abandon(self) -> None:
        """Close the file as it is; the folder that holds it is removed."""
        if self._file is not None:
            with suppress(OSError, pa.ArrowException):
                self._file.close()

    def _write(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting).unify_dictionaries()
        self._waiting, self._waiting_rows = [], 0
        with _saving(self._path):
            if self._file is None:
                self._file = pq.ParquetWriter(self._path, table.schema)
            self._file.write_table(table, row_group_size=GROUP_ROWS)


def scored_rows(
    folder: ScoredFolder, scores: Sequence[Tensor], kept: Sequence[pa.RecordBatch]
) -> pa.Table:
    """The scores of B rows beside their columns.

    Args:
        scores: (B,), or (B, C) of C classes or places, for each of the folder's names.
        kept: rows of the folder's columns, B together; none where it has no columns.
    Raises:
        InputError: a column holds what does not fit its type in other files.
    """
    arrays: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name, score in zip(folder.names, scores, strict=True):
        own = score.float() if score.is_floating_point() else score
        values = pa.array(own.cpu().reshape(-1).numpy())
        if score.dim() == 2:
            values = pa.FixedSizeListArray.from_arrays(values, score.shape[1])
        arrays[name] = values
    for field in folder.columns:
        try:
            pieces = [batch.column(field.name).cast(field.type) for batch in kept]
        except pa.ArrowException as error:
            raise InputError(
                f"column {field.name!r} holds what does not fit {field.type}: {one_line(error)}. "
                "Write all files with the same types, or leave the column out."
            ) from error
        arrays[field.name] = pa.chunked_array(pieces, field.type)
    return pa.table(arrays)


class WholeFolder:
    """A folder that appears when it is complete; until then it is a hidden one beside its place.

    Args:
        path: absolute path of the folder, which is new or empty.
    Raises:
        SaveError: the storage refuses.
    """

    def __init__(self, path: str) -> None:
        self._path, self._place = path, Path(os.path.realpath(path))
        self._missing = [folder for folder in self._place.parents if not folder.exists()]
        with _saving(path):
            self._place.parent.mkdir(parents=True, exist_ok=True)
            self.hidden = Path(tempfile.mkdtemp(prefix=".rayrec-", dir=self._place.parent))

    def publish(self) -> None:
        """Give the folder its name.

        Raises:
            SaveError: the storage refuses, or another process has put files there.
        """
        with _saving(self._path):
            # mkdtemp lets nobody else in; mkdir says what this user lets others do
            like = self.hidden / "like"
            like.mkdir()
            mode = like.stat().st_mode
            like.rmdir()
            self.hidden.chmod(mode)
            # takes the place of an empty folder, and never that of one with files
            self.hidden.rename(self._place)

    def abandon(self) -> None:
        """Remove the folder, and those above it that were made for it."""
        shutil.rmtree(self.hidden, ignore_errors=True)
        for folder in self._missing:
            with suppress(OSError):  # removes only an empty folder
                folder.rmdir()
