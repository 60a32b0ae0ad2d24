"""Checkpoints by the name of their run: RUN@latest and RUN@best, in the place of a step's folder.

Whatever takes the folder of a checkpoint takes these as well. A run is a folder of steps; which of
them had the best evaluation, the newest checkpoint says. Where a run's folder itself is given, the
error names both. Looking one up lists the folder and reads one manifest.
"""

from __future__ import annotations

import os

from pyarrow import fs

from rayrec.checkpoint.manager import CheckpointManager
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.store import Store
from rayrec.checks import absolute_path
from rayrec.errors import CheckpointError
from rayrec.fields.typed import check_argument

LATEST, BEST = "latest", "best"


def checkpoint_path(what: str, path: str | os.PathLike[str]) -> str:
    """The absolute folder of a checkpoint that is named by its path, or by its run.

    Args:
        what: text by which messages name the checkpoint.
        path: its folder or a URI, or that of a run with @latest or @best behind it.
    Raises:
        ConfigError: it is no path.
        CheckpointError: the run has no such checkpoint.
    """
    return located(absolute_path(what, path))


def located(path: str | os.PathLike[str], filesystem: fs.FileSystem | None = None) -> str:
    """The folder of a checkpoint; looks RUN@latest and RUN@best up.

    Raises:
        ConfigError: it is no path.
        CheckpointError: the run has no such checkpoint.
    """
    check_argument("a checkpoint", "path", path, str)
    run, _, word = os.fspath(path).rpartition("@")
    if not run or word not in (LATEST, BEST):
        return os.fspath(path)
    manager = CheckpointManager(run, filesystem)
    steps = manager.steps()
    if not steps:
        raise CheckpointError(f"{run} holds no complete checkpoint, and {path} names one of it.")
    newest = manager.path(steps[-1])
    if word == LATEST:
        return newest
    best = manager.best_step(steps)
    if best is None:
        raise CheckpointError(
            f"{run} was not evaluated with a score to compare by, so that none of its checkpoints "
            f"is the best; its newest is {newest}. EvaluationConfig(score=...) compares them."
        )
    if best not in steps:
        raise CheckpointError(
            f"the best evaluation of {run} was at step {best}, of which it holds no checkpoint; "
            f"its newest is {newest}. EvaluationConfig(keep_best=True) saves the best."
        )
    return manager.path(best)


def open_checkpoint(path: str, filesystem: fs.FileSystem | None = None) -> tuple[Store, Manifest]:
    """The folder and the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none; or it is damaged; or `path` is a run's folder, and which
            checkpoints that has.
    """
    store = Store(located(path, filesystem), filesystem)
    try:
        return store, store.manifest()
    except CheckpointError:
        if store.has_manifest():
            raise
        named, _, word = path.rpartition("@")
        # RUN@word with another word: the run is what stands before the @
        for run, wrong in (
            (path, "is the folder of a run and no checkpoint"),
            (named, f"is no checkpoint, and {word!r} no word for one"),
        ):
            told = run and _checkpoints_of(run, filesystem)
            if told:
                raise CheckpointError(
                    f"{path} {wrong}. {told} Name one of its checkpoints, or {run}@{LATEST} or "
                    f"{run}@{BEST}."
                ) from None
        raise


def _checkpoints_of(run: str, filesystem: fs.FileSystem | None) -> str:
    """Return a sentence on the checkpoints of a run; "" where it has none or is no run."""
    manager = CheckpointManager(run, filesystem)
    try:
        steps = manager.steps()
    except CheckpointError:
        return ""
    if not steps:
        return ""
    best = manager.best_step(steps)
    told = f"Its newest is {manager.path(steps[-1])}"
    if best is not None:
        kept = "" if best in steps else ", which was not kept"
        told = f"{told}, its best {manager.path(best)}{kept}"
    return f"{told}."
