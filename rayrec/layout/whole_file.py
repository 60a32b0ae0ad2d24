"""A small text file that a reader sees whole: the old one or the new, also on a full disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a local file, or that to which a link leads; a device or a pipe is written to.

    Raises:
        OSError: the file system refuses; what was there is as it was.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    # in the same folder, since a rename is atomic within one file system only
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, target)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
        raise
