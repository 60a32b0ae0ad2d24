"""The folder that a conversion writes: its parts appear together when all is written.

A conversion writes into a hidden folder beside its result and moves the parts into place at the
end. A conversion that fails leaves what was there before, and no folder of its own. Files of an
earlier conversion would be read together with the new ones, so they are an error, or are replaced
where the user says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rayrec.errors import ConfigError

PARTS = ("train", "eval", "schema.json", "truth.json")


@contextmanager
def new_data_set(out: str | Path, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write to; what is in it at the end of the block is moved to `out`.

    Args:
        out: the folder of the result; made if need be. Other files in it stay as they are.
        overwrite: replace train/, eval/ and the schema of an earlier conversion.
    Raises:
        ConfigError: `out` holds data and `overwrite` is not set, or it cannot be written to.
    """
    target = Path(out)
    there = [name for name in PARTS if _holds_data(target / name)]
    if there and not overwrite:
        raise ConfigError(
            f"{target} already holds {' and '.join(there)}, which would be read together with the "
            "new data. Name a new folder, or say overwrite=True (--overwrite) to replace them."
        )
    made = [folder for folder in (target, *target.parents) if not os.path.lexists(folder)]
    try:
        target.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target, prefix=".converting-"))
    except OSError as error:
        _remove_empty(made)
        raise ConfigError(
            f"cannot write to {target}: {error.strerror}. Name a folder that can be written to."
        ) from None
    try:
        yield partial
        for name in PARTS:
            old, new = target / name, partial / name
            if not new.exists() and not (there and old.exists()):
                continue
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
            if new.exists():
                new.rename(old)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(made)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that were made for nothing, the innermost first."""
    for folder in folders:
        with suppress(OSError):  # one that is not empty stays
            folder.rmdir()


def _holds_data(path: Path) -> bool:
    return os.path.isfile(path) or (os.path.isdir(path) and any(path.iterdir()))
