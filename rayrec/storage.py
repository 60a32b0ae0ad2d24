"""Where paths lead: their file system, files that must be writable, and folders that several hosts share.

Ranks on several hosts write one checkpoint, so they must see one folder. The driver leaves a token
file in it, every rank looks for the token and proves that it can write, before training starts. The
same is asked of data files. A path on one host's own disk is found this way in a second, and not
when the first checkpoint is written. Files that a command writes at its end are proven writable
before its work starts, and are written whole or not at all.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from rayrec.checks import is_uri
from rayrec.errors import CheckpointError, ConfigError


def resolve(path: str, filesystem: fs.FileSystem | None = None) -> tuple[fs.FileSystem, str]:
    """The file system of `path` and the path in it, without a trailing slash.

    Args:
        path: a local path or a URI such as "s3://bucket/run".
        filesystem: used instead of the one that `path` names.
    Raises:
        CheckpointError: no file system for the URI.
    """
    path = os.fspath(path)
    if filesystem is None and "://" in path:
        try:
            filesystem, path = fs.FileSystem.from_uri(path)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise CheckpointError(
                f"no filesystem for {path!r}: {one_line(error)}. Use a local path, s3://, gs:// or pass filesystem=."
            ) from error
    elif filesystem is None:
        filesystem, path = fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    return filesystem, path.rstrip("/")


def folder_trouble(path: str, token: str) -> str:
    """Why this process cannot share the folder with the one that left the token there; "" when it can.

    Args:
        path: absolute folder or URI.
        token: name of the file that was left.
    """
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
    """The first of some local files that this process does not see as they are elsewhere; "" when it sees all.

    Args:
        files: path and size in bytes of each.
    """
    for path, size in files:
        try:
            found = os.stat(path).st_size
        except OSError:
            return f"does not see {path}"
        if found != size:
            return f"sees {path} with {found} bytes, the driver with {size}"
    return ""


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def probe_output(what: str, path: str | None) -> None:
    """Check that a file can be written at `path`; its folder is made if need be.

    Args:
        what: the option that names it, for the message.
        path: local path or URI; None is nothing to check.
    Raises:
        ConfigError: it is a folder, or its folder cannot be written to.
    """
    if path is None:
        return
    try:
        if is_uri(path):
            filesystem, target = resolve(path)
            with filesystem.open_output_stream(f"{target}.probe", compression=None):
                pass
            filesystem.delete_file(f"{target}.probe")
            return
        target_path = Path(path)
        if target_path.is_dir():
            raise ConfigError(f"cannot write {what} to {path}: it is a folder. Name a file.")
        target_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target_path.parent):
            pass
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"cannot write {what} to {path}: {one_line(error)}. Name a file in a folder that can be written to.") from None


def write_whole(what: str, path: str, content: str) -> None:
    """Write a text file so that it appears whole or not at all.

    Raises:
        ConfigError: it cannot be written; nothing is left behind.
    """
    try:
        if is_uri(path):
            filesystem, target = resolve(path)
            with filesystem.open_output_stream(target, compression=None) as stream:
                stream.write(content.encode())
            return
        target_path = Path(path)
        target_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=target_path.parent, prefix=f".{target_path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
            os.chmod(partial, 0o666 & ~_umask())
            os.replace(partial, target_path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"cannot write {what} to {path}: {one_line(error)}.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
