"""The files of a data set: which file system holds them, which are data, and their chunks."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.partitions import Value
from rayrec.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file: its path in the file system, its bytes, and the rows that its chunks give.

    `folders` are the columns that its folders spell, with their values.
    """

    path: str
    size: int
    chunk_rows: tuple[int, ...]
    folders: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Row group or record batch `index` of a file.

    It begins at row `first_row` of the rows that are taken of the file.
    """

    file: DataFile
    index: int
    first_row: int
    rows: int


def resolve_path(path: str, filesystem: pafs.FileSystem | None) -> tuple[pafs.FileSystem, str]:
    """The file system that holds a path, and the path in it.

    Raises:
        InputError: a URI that pyarrow.fs cannot open.
    """
    if filesystem is not None:
        return filesystem, path.rstrip("/")
    if len(urlsplit(path).scheme) > 1:
        try:
            return pafs.FileSystem.from_uri(path.rstrip("/"))
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"cannot open {path!r}: {error}. Give a local path or a URI that pyarrow.fs knows."
            ) from error
    return pafs.LocalFileSystem(), posixpath.abspath(path)


def list_files(
    filesystem: pafs.FileSystem, root: str, path: str, kind: str, suffixes: tuple[str, ...]
) -> list[pafs.FileInfo]:
    """The data files at `root`, in the order of their paths: itself, or those below it.

    Args:
        path: as the user gave it, for messages.
        kind, suffixes: of the files wanted; a name that starts with '.' or '_' is hidden.
    Raises:
        InputError: there is nothing, or nothing of this kind.
    """
    try:
        info = filesystem.get_file_info(root)
        if info.type == pafs.FileType.File:
            return [info]
        entries = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    except OSError as error:
        raise InputError(f"no data at {path!r}: {error}. Check the path.") from error
    below = [entry for entry in entries if entry.type == pafs.FileType.File]
    files = [entry for entry in below if _is_data(entry.path[len(root) :], suffixes)]
    if not files:
        raise InputError(
            f"the directory {path!r} holds {len(below)} files, none of them {kind} "
            f"({', '.join(suffixes)}). Check the path, or use the data set class of its "
            "format."
        )
    return sorted(files, key=lambda i: i.path)


def _is_data(name: str, suffixes: tuple[str, ...]) -> bool:
    """True for a path below the root that has one of the suffixes and is not hidden."""
    hidden = any(part.startswith((".", "_")) for part in name.strip("/").split("/"))
    return not hidden and name.endswith(suffixes)
