"""The files below a path, without those that `where` leaves out by their folders; none stays open.

`find_files` lists them and `FoundFiles` opens them, with the columns that their folders spell and
the rows that `where` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.histories import Histories, HistoryReader
from rayrec.data.listing import DataFile, list_files, resolve_path
from rayrec.data.partitions import Partitions
from rayrec.data.predicate import parse_where
from rayrec.data.readers import ArrowReader, FileReader, ParquetReader
from rayrec.data.selected import Selection
from rayrec.errors import InputError
from rayrec.storage import one_line

Kind = type[ParquetReader] | type[ArrowReader]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFiles:
    """The way to open the files of one data set.

    Attributes:
        root: path of the data set in its file system.
        kind: all of its files are of.
        listed: number of files, with those that are left out.
        histories: cut from the events of each file, before rows are left out; or None.
    """

    filesystem: pafs.FileSystem
    root: str
    kind: Kind
    threads: bool
    selection: Selection
    listed: int
    histories: Histories | None = None

    @property
    def where(self) -> str | None:
        """The canonical text of `where`; None where all rows are taken."""
        return None if self.selection.predicate is True else str(self.selection.predicate)

    def open(self, file: DataFile, check: bool = False) -> FileReader:
        """Open a file, with the columns of its folders and the rows that are taken.

        Args:
            check: `where` can be asked of the file, else raise.
        Raises:
            InputError: it is gone, truncated or of another kind; or see `check_terms`.
        """
        try:
            own: FileReader = self.kind(self.filesystem, file.path, self.threads)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self.broken(file.path, error) from error
        if self.histories is not None:
            own = HistoryReader(own, self.histories, file.path)
        folders = dict(file.folders)
        if check:
            self.selection.check(own, folders, file.path)
        return self.selection.reader(own, folders)

    def check_log(self, files: Sequence[DataFile]) -> None:
        """Check the order of users and times in the files that histories are cut from.

        Raises:
            InputError: names column, row and file.
        Cost: the columns of users and times are read.
        """
        last = None
        if self.histories is None:
            return
        for file in files:
            try:
                own = self.kind(self.filesystem, file.path, self.threads)
                last = HistoryReader(own, self.histories, file.path).check(last)
            except (pa.ArrowException, OSError) as error:
                raise self.broken(file.path, error) from error

    def broken(self, path: str, error: Exception) -> InputError:
        """The error for a file that cannot be read."""
        return InputError(
            f"cannot read {path!r} as {self.kind.KIND}: {one_line(error)}. It may be truncated or "
            "of another format; write it again, or bring a copy back."
        )


def find_files(
    path: str,
    kinds: Sequence[Kind],
    where: str | None,
    *,
    filesystem: pafs.FileSystem | None = None,
    threads: bool = False,
    histories: Histories | None = None,
) -> tuple[FoundFiles, list[DataFile]]:
    """List the files at a path, in the order of their paths.

    Args:
        kinds: of the files wanted; they must all be of one of them.
        filesystem, threads: see `FileDataset`.
        histories: to cut from the events of each file.
    Returns:
        How they are opened, and those that folders do not leave out, whose rows are not known yet.
    Raises:
        ConfigError: `where` cannot be read.
        InputError: nothing there, files of two kinds, or a `where` that does not fit.
    """
    predicate = True if where is None else parse_where(where)
    filesystem, root = resolve_path(path, filesystem)
    names = " or ".join(kind.KIND for kind in kinds)
    suffixes = tuple(suffix for kind in kinds for suffix in kind.SUFFIXES)
    infos = list_files(filesystem, root, path, names, suffixes)
    below = [str(info.path[len(root) :]).lstrip("/") for info in infos]
    selection = Selection(predicate, Partitions.of(below))
    selection.check_folders(path)
    found = FoundFiles(
        filesystem=filesystem,
        root=root,
        kind=_one_kind(kinds, [info.path for info in infos], path),
        threads=threads,
        selection=selection,
        listed=len(infos),
        histories=histories,
    )
    listed = []
    for info, name in zip(infos, below, strict=True):
        folders = tuple(selection.partitions.values(name).items())
        listed.append(DataFile(path=info.path, size=info.size, chunk_rows=(), folders=folders))
    files = [file for file in listed if selection.may_take(dict(file.folders))]
    if not files:
        # no file would be opened, and a misspelt column pass for one that no row fits
        found.open(listed[0], check=True)
    return found, files


def _one_kind(kinds: Sequence[Kind], files: Sequence[str], path: str) -> Kind:
    held = [kind for kind in kinds if any(name.endswith(kind.SUFFIXES) for name in files)]
    if len(held) > 1:
        raise InputError(
            f"{path!r} holds {' and '.join(kind.KIND for kind in held)} files. Put one kind into a "
            "folder of its own."
        )
    # a file that is named itself may have any suffix
    return held[0] if held else kinds[0]
