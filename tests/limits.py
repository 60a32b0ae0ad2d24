"""Storage that refuses: files that cannot grow, as on a full disk; folders that do not change."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


NOBODY = 65534


@contextmanager
def open_folder() -> Iterator[Path]:
    """Give a folder that every user may look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def no_changes(folder: Path) -> Iterator[None]:
    """Let this process, that of root as well, read a tree and change nothing in it."""
    user = os.geteuid()
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for one in folders:
        one.chmod(0o555)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)
        for one in folders:
            one.chmod(0o755)
