"""The checkpoints of one run: one directory per step, the newest one, the removal of old ones.

A directory counts when it has a manifest. Deleting takes the manifest first, so that a deletion cut
short leaves no half checkpoint. Only directories with the name of a step are ever touched.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence

import pyarrow as pa
from pyarrow import fs

from rayrec.checkpoint.manifest import MANIFEST
from rayrec.checkpoint.store import Store, resolve
from rayrec.errors import CheckpointError, ConfigError, SaveError
from rayrec.storage import one_line

_STEP = re.compile(r"step-(\d{8,})")


class CheckpointManager:
    """The checkpoints under one storage path.

    It keeps no state, so any process may have one. Only one rank should prune.

    Args:
        storage_path: local path or URI; need not exist yet.
        filesystem: used instead of the one that `storage_path` names.
    """

    def __init__(self, storage_path: str, filesystem: fs.FileSystem | None = None) -> None:
        self._filesystem, self._root = resolve(storage_path, filesystem)
        self._path = str(storage_path).rstrip("/")

    def path(self, step: int) -> str:
        """Return the folder for the checkpoint of `step`: `<storage_path>/step-00000100`."""
        return f"{self._path}/step-{step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Steps with a complete checkpoint, ascending.

        Raises:
            CheckpointError: the storage path cannot be listed.
        """
        return tuple(sorted(step for step, complete in self._scan().items() if complete))

    def step_of(self, path: str) -> int | None:
        """The step of a checkpoint directory of this run, or None when `path` lies elsewhere."""
        _, root = resolve(path, self._filesystem if "://" not in path else None)
        parent, _, name = root.rpartition("/")
        # A checkpoint of another run may be called alike, so the folder around it counts, too.
        match = _STEP.fullmatch(name)
        return int(match[1]) if match and parent == self._root else None

    def set_aside(self, after_step: int) -> str | None:
        """Move the directories of all steps after `after_step` away, without deleting any.

        They go to `<storage_path>/set-aside-<time>/`, under their names. A run that goes on from an
        earlier step writes those steps anew and must not mix with what an earlier life of it wrote.

        Returns:
            the folder they were moved to, or None when there were none.
        Raises:
            CheckpointError: the storage refuses.
        """
        later = sorted(step for step in self._scan() if step > after_step)
        if not later:
            return None
        name = f"set-aside-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        try:
            for step in reversed(later):  # newest first: what is left is always an unbroken past
                directory = f"step-{step:08d}"
                self._move(f"{self._root}/{directory}", f"{self._root}/{name}/{directory}")
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(
                f"cannot set aside the checkpoints after step {after_step} in {self._path}: "
                f"{error}."
            ) from error
        return f"{self._path}/{name}"

    def _move(self, source: str, target: str) -> None:
        """Move a directory; file by file on object stores, which know no directories."""
        self._filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        if isinstance(self._filesystem, fs.LocalFileSystem):
            self._filesystem.move(source, target)
            return
        infos = self._filesystem.get_file_info(fs.FileSelector(source, recursive=True))
        files = [info.path for info in infos if info.type == fs.FileType.File]
        # the manifest goes first: without it the rest is no checkpoint, wherever the move is cut
        # short
        files.sort(key=lambda path: not path.endswith(f"/{MANIFEST}"))
        for path in files:
            moved = f"{target}{path[len(source) :]}"
            self._filesystem.create_dir(moved.rpartition("/")[0], recursive=True)
            self._filesystem.move(path, moved)
        self._filesystem.delete_dir(source)

    def latest(self) -> str | None:
        """Path of the newest complete checkpoint, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best_step(self, steps: Sequence[int]) -> int | None:
        """The step of the best evaluation, of which the newest of these checkpoints tells.

        None where no evaluations were compared. The checkpoint of that step may not be kept.
        """
        for step in reversed(steps):
            try:
                best = Store(self.path(step), self._filesystem).manifest().extras.get("best")
            except CheckpointError:
                continue  # it is damaged; the one before it may tell
            return best["step"] if best else None
        return None

    def prune(self, num_to_keep: int, keep: Collection[int] = ()) -> tuple[int, ...]:
        """Delete old checkpoints, and what unfinished saves before the newest one left behind.

        The `num_to_keep` newest complete checkpoints stay, and those of the steps in `keep`; of
        increments, all that they add to stays as well.

        Returns:
            the complete steps that were deleted, ascending.
        Raises:
            ConfigError: `num_to_keep` is below 1.
            SaveError: the storage refuses to delete one; those before it are gone.
        """
        if num_to_keep < 1:
            raise ConfigError(
                f"num_to_keep={num_to_keep} would delete every checkpoint; keep at least 1."
            )
        has_manifest = self._scan()
        complete = sorted(step for step, whole in has_manifest.items() if whole)
        wanted = {*complete[-num_to_keep:], *(step for step in keep if step in complete)}
        kept = self._with_parents(wanted, complete)
        # newest first, so that what is left of a chain is its beginning
        old = [step for step in reversed(complete) if step not in kept]
        # a save after the newest checkpoint may still be under way
        newest = complete[-1] if complete else 0
        unfinished = [s for s, whole in has_manifest.items() if not whole and s < newest]
        # the manifest goes first: a deletion cut short leaves no half checkpoint
        for step in (*old, *unfinished):
            directory = f"{self._root}/step-{step:08d}"
            try:
                if has_manifest[step]:
                    self._filesystem.delete_file(f"{directory}/{MANIFEST}")
                self._filesystem.delete_dir(directory)
            except (OSError, pa.ArrowException) as error:
                raise SaveError(
                    f"cannot delete the old checkpoint {self.path(step)}: {one_line(error)}. Let "
                    "it be deleted, or keep more of them (num_to_keep)."
                ) from error
        return tuple(sorted(old))

    def _with_parents(self, steps: Collection[int], complete: Sequence[int]) -> set[int]:
        """These steps, and those of all checkpoints that increments among them add to."""
        kept: set[int] = set()
        for step in sorted(steps, reverse=True):
            at: int | None = step
            while at is not None and at not in kept:
                kept.add(at)
                at = self._parent(at, complete)
        return kept

    def _parent(self, step: int, complete: Sequence[int]) -> int | None:
        """The step that the checkpoint of a step adds to, or None when it has all rows."""
        try:
            parent = Store(self.path(step), self._filesystem).manifest().parent
            name = None if parent is None else parent.name
        except CheckpointError:
            # Nothing tells what a damaged checkpoint adds to, so the one before it stays.
            return max((s for s in complete if s < step), default=None)
        match = _STEP.fullmatch(name or "")
        return int(match[1]) if match else None

    def clear_unfinished(self, after_step: int) -> tuple[int, ...]:
        """Delete what unfinished saves after a step left behind; the steps of them, ascending.

        No rank may be saving: a run calls it when all ranks have left a world that failed.
        """
        left = sorted(s for s, whole in self._scan().items() if not whole and s > after_step)
        for step in left:
            self._filesystem.delete_dir(f"{self._root}/step-{step:08d}")
        return tuple(left)

    def _scan(self) -> dict[int, bool]:
        """Step -> whether it has a manifest, for every step directory."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        try:
            entries = self._filesystem.get_file_info(selector)
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(
                f"{self._path} cannot be listed: {str(error).splitlines()[0]}. Is it a folder?"
            ) from error
        names = [entry.base_name for entry in entries if entry.type == fs.FileType.Directory]
        steps = [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
        manifests = [f"{self._root}/step-{step:08d}/{MANIFEST}" for step in steps]
        infos = self._filesystem.get_file_info(manifests)
        whole = [info.type == fs.FileType.File for info in infos]
        return dict(zip(steps, whole, strict=True))
