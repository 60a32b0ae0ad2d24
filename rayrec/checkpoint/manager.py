"""The checkpoints of one run: a directory per step, the newest complete one, and the removal of old ones.

A directory counts when it has a manifest. Deleting takes the manifest first, so that a deletion cut short leaves no half checkpoint. Only
directories with the name of a step are ever touched.
"""

from __future__ import annotations

import re

from pyarrow import fs

from rayrec.checkpoint.manifest import MANIFEST
from rayrec.checkpoint.store import resolve
from rayrec.errors import ConfigError

_STEP = re.compile(r"step-(\d{8,})")


class CheckpointManager:
    """The checkpoints under one storage path; stateless, so any process may have one. Let one rank prune.

    Args:
        storage_path: local path or URI; need not exist yet.
        filesystem: used instead of the one that `storage_path` names.
    """

    def __init__(self, storage_path: str, filesystem: fs.FileSystem | None = None) -> None:
        self._filesystem, self._root = resolve(storage_path, filesystem)
        self._path = str(storage_path).rstrip("/")

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` goes: `<storage_path>/step-00000100`."""
        return f"{self._path}/step-{step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Steps with a complete checkpoint, ascending."""
        return tuple(sorted(step for step, complete in self._scan().items() if complete))

    def latest(self) -> str | None:
        """Path of the newest complete checkpoint, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def prune(self, num_to_keep: int) -> tuple[int, ...]:
        """Delete all but the `num_to_keep` newest complete checkpoints, and what unfinished saves before the newest one left behind.

        Returns:
            the complete steps that were deleted, ascending.
        Raises:
            ConfigError: `num_to_keep` is below 1.
        """
        if num_to_keep < 1:
            raise ConfigError(f"num_to_keep={num_to_keep} would delete every checkpoint; keep at least 1.")
        found = self._scan()
        complete = sorted(step for step in found if found[step])
        old = complete[:-num_to_keep]
        unfinished = [step for step in found if not found[step] and complete and step < complete[-1]]
        for step in (*old, *unfinished):
            directory = f"{self._root}/step-{step:08d}"
            if found[step]:
                self._filesystem.delete_file(f"{directory}/{MANIFEST}")
            self._filesystem.delete_dir(directory)
        return tuple(old)

    def _scan(self) -> dict[int, bool]:
        """Step -> whether it has a manifest, for every step directory."""
        entries = self._filesystem.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        steps = [int(match[1]) for e in entries if e.type == fs.FileType.Directory and (match := _STEP.fullmatch(e.base_name))]
        infos = self._filesystem.get_file_info([f"{self._root}/step-{step:08d}/{MANIFEST}" for step in steps])
        return {step: info.type == fs.FileType.File for step, info in zip(steps, infos, strict=True)}
