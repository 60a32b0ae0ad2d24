"""Files of a folder that others can write to: opened so that nobody waits for them for ever.

A pipe in the place of a file would hold whoever opens it, a device would never end, and a file of
any size can be made of nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from rayrec.errors import ArtifactError

_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a record names: path in its folder, size in bytes, sha256 of its bytes."""

    path: str
    bytes: int
    sha256: str

    def check(self, where: str, folder: str) -> None:
        """Check path and size for the record at `where`, in such a folder.

        Raises:
            ValueError: it cannot.
            ArtifactError: it lies outside of the folder.
        """
        if self.bytes < 0:
            raise ValueError(f"file {self.path!r} has {self.bytes} bytes")
        if b"\0" in self.path.encode():
            raise ValueError(f"file {self.path!r} has a null character")
        if self.path.startswith("/") or ".." in self.path.split("/"):
            raise ArtifactError(
                f"{where} names file {self.path!r}, which lies outside of the {folder}. Copy it "
                "again from where it was written."
            )


def open_plain(path: Path) -> FileIO:
    """Open a plain file to read.

    Raises:
        OSError: it is not there, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return open(descriptor, "rb", buffering=0)


def read_plain(path: Path) -> bytes:
    """Read the bytes of a small file, such as a manifest.

    Raises:
        OSError: `open_plain` refuses the file, or it is too large to be one.
    """
    with open_plain(path) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES} bytes", str(path))
    return text
