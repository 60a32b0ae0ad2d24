"""Paths: file systems, files that must be writable, folders that several hosts share,
and the base of file objects that pyarrow writes to.

Ranks on several hosts write one checkpoint, so they must see one folder. The driver leaves a token
file in it, every rank looks for the token and proves that it can write, before training starts. The
same is asked of data files. A path on one host's own disk is found this way in a second, and not
when the first checkpoint is written. Files that a command writes at its end are proven writable
before its work starts, and are written whole or not at all. pyarrow is imported where a path needs
it, so that a plan can be written without it.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rayrec.checks import is_uri
from rayrec.errors import CheckpointError, ConfigError, SaveError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs


class Sink(ABC):
    """Base of file objects that pyarrow writes to; a subclass says where the bytes go.

    Attributes:
        num_bytes: number of bytes written so far; `write` counts them.
        closed: True once pyarrow is done; the file below is closed by whoever opened it.
    """

    def __init__(self) -> None:
        self.num_bytes, self.closed = 0, False

    @abstractmethod
    def write(self, data: bytes | pa.Buffer) -> int:
        """Write all of `data`, and return its bytes."""

    def tell(self) -> int:
        """Bytes written so far."""
        return self.num_bytes

    def flush(self) -> None:  # noqa: B027  # pyarrow calls it
        """Do nothing: no bytes are held back."""

    def readable(self) -> bool:
        """Return False: it is only written."""
        return False

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return False: it is written from start to end."""
        return False

    def close(self) -> None:
        """Note that nothing more comes."""
        self.closed = True


def resolve(path: str, filesystem: fs.FileSystem | None = None) -> tuple[fs.FileSystem, str]:
    """The file system of `path` and the path in it, without a trailing slash.

    Args:
        path: a local path or a URI such as "s3://bucket/run".
        filesystem: used instead of the one that `path` names.
    Raises:
        CheckpointError: no file system for the URI.
    """
    import pyarrow as pa
    from pyarrow import fs

    path = os.fspath(path)
    if filesystem is None and "://" in path:
        try:
            filesystem, path = fs.FileSystem.from_uri(path)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise CheckpointError(
                f"no filesystem for {path!r}: {one_line(error)}. Use a local path, s3://, gs:// or "
                "pass filesystem=."
            ) from error
    elif filesystem is None:
        filesystem, path = fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    return filesystem, path.rstrip("/")


def folder_trouble(path: str, token: str) -> str:
    """Why this process cannot share a folder with the one that left a token there, or "".

    Args:
        path: absolute folder or URI.
        token: name of the file that was left.
    """
    import pyarrow as pa
    from pyarrow import fs

    own = f"{token}-{uuid.uuid4().hex[:8]}"
    try:
        filesystem, root = resolve(path)
        if filesystem.get_file_info(f"{root}/{token}").type != fs.FileType.File:
            return "does not see what the driver wrote there"
        with filesystem.open_output_stream(f"{root}/{own}", compression=None) as stream:
            stream.write(b"rayrec")
        filesystem.delete_file(f"{root}/{own}")
    except (OSError, pa.ArrowException, CheckpointError) as error:
        return f"cannot write there: {one_line(error)}"
    return ""


def missing_file(files: Sequence[tuple[str, int]]) -> str:
    """The first local file that this process does not see as it is elsewhere, or "".

    Args:
        files: path and size in bytes of each.
    """
    for path, size in files:
        try:
            seen = os.stat(path).st_size
        except OSError:
            return f"does not see {path}"
        if seen != size:
            return f"sees {path} with {seen} bytes, the driver with {size}"
    return ""


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def probe_output(what: str, path: str | None) -> None:
    """Check that a file can be written at `path`; the attempt leaves nothing, not even a folder.

    Args:
        what: the option that names it, for the message.
        path: local path or URI; None is nothing to check.
    Raises:
        ConfigError: it is a folder, or its folder cannot be made or written to.
    """
    if path is None:
        return
    if not is_uri(path) and os.path.isdir(path):
        raise ConfigError(f"cannot write {what} to {path}: it is a folder. Name a file.")
    try:
        if is_uri(path):
            _write_uri(f"{path}.probe", b"", keep=False)
        else:
            _probe_local(Path(path))
    except (OSError, UnicodeError, CheckpointError) as error:
        raise ConfigError(
            f"cannot write {what} to {path}: {one_line(error)}. Name a file in a folder that can "
            "be written to."
        ) from None


def _write_uri(uri: str, content: bytes, keep: bool = True) -> None:
    """Write a file of a file system that pyarrow knows, and delete it unless it is to be kept.

    Raises:
        OSError, CheckpointError: the file system refuses, or there is none.
    """
    import pyarrow as pa

    filesystem, target = resolve(uri)
    try:
        with filesystem.open_output_stream(target, compression=None) as stream:
            stream.write(content)
        if not keep:
            filesystem.delete_file(target)
    except pa.ArrowException as error:
        raise OSError(one_line(error)) from error


def _probe_local(target: Path) -> None:
    """Make the folder of a file, write into it, and remove what was made.

    Raises:
        OSError: the folder cannot be made or written to, or the name is too long.
    """
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
        with suppress(FileNotFoundError):
            target.lstat()
    finally:
        remove_empty(missing)


def write_whole(what: str, path: str, content: str | bytes) -> None:
    """Write a file so that it appears whole or not at all; a device or a pipe is written to.

    Raises:
        SaveError: it cannot be written; nothing is left behind.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        if is_uri(path):
            _write_uri(path, data)
            return
        target_path = Path(path)
        if target_path.exists() and not target_path.is_file():
            target_path.write_bytes(data)  # never replaced by a file
            return
        with _written_aside(target_path, data) as partial:
            os.replace(partial, target_path)
    except (OSError, UnicodeError, CheckpointError) as error:
        raise SaveError(f"cannot write {what} to {path}: {one_line(error)}.") from None


def write_new(what: str, path: str, content: str) -> bool:
    """Write a local file whole and to the disk, and return True; False where there is one already.

    Raises:
        SaveError: it cannot be written.
    """
    target = Path(path)
    try:
        with _written_aside(target, content.encode()) as partial:
            sync(partial)
            try:
                os.link(partial, target)
            except FileExistsError:
                return False
            sync(target.parent)
    except OSError as error:
        raise SaveError(f"cannot write {what} to {path}: {one_line(error)}.") from error
    return True


@contextmanager
def _written_aside(target: Path, data: bytes) -> Iterator[str]:
    """Write data beside a target, for the block to move there; what stays aside is deleted."""
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=target.parent, prefix=".rayrec-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.chmod(partial, 0o666 & ~_umask())
            yield partial
        finally:
            with suppress(OSError):
                os.unlink(partial)
    finally:
        remove_empty(missing)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that were made for nothing, the innermost first."""
    for folder in folders:
        with suppress(OSError):  # one that is not empty stays
            folder.rmdir()


def sync(path: str | Path) -> None:
    """Flush a local file, or the names of a folder, to the disk.

    Raises:
        OSError: the file system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
