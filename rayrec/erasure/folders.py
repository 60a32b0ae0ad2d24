"""`StoredFolders`: the checkpoints, artifacts and publications below a folder, at any depth.

What an unfinished save or publication left holds rows as well, and is removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from rayrec.checkpoint import CheckpointManager
from rayrec.checkpoint.manifest import FORMAT
from rayrec.data import FeatureSchema
from rayrec.driver.run_folder import ERASURE, LOCK
from rayrec.erasure.artifacts import StoredArtifact
from rayrec.erasure.chains import StoredChain
from rayrec.erasure.checkpoints import StoredCheckpoint
from rayrec.erasure.keys import TableSize
from rayrec.erasure.windows import StoredWindows
from rayrec.errors import ConfigError, DamagedCheckpointError
from rayrec.machine.folder_lock import folder_lock
from rayrec.serve.chain.publication import place_of
from rayrec.serve.manifest import MANIFEST
from rayrec.streams.kept import FOLDER as STREAM
from rayrec.watch.event_file import NAME as EVENTS

RECEIPT = "forgotten-"  # begins the names of receipts


class StoredFolders:
    """What a folder holds, by path below it; no run may write to it.

    Attributes:
        checkpoints: checkpoints, in the order of their steps.
        artifacts: artifacts that are no publications.
        chains: folders of publications.
        windows: folders of the windows of a stream.
        others: paths of files that are part of none of these.
    Raises:
        ConfigError: it holds none of these, or is one itself, or a link is in it, or it lies in the
            folder of a run, or around one, or an export writes to it.
        CheckpointError, ArtifactError: something cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self.checkpoints = dict[str, StoredCheckpoint]()
        self.artifacts = dict[str, StoredArtifact]()
        self.chains = dict[str, StoredChain]()
        self.windows = dict[str, StoredWindows]()
        self.others: list[str] = []
        if (root / MANIFEST).exists():
            raise ConfigError(f"{root} is one checkpoint or artifact; name the folder around it.")
        runs = [one for one in root.resolve().parents if _is_run(one)]
        if runs:
            raise ConfigError(f"{root} lies in the folder of a run; name that: {runs[0]}.")
        for folder, folders, files in os.walk(root):
            self._add(root, Path(folder), folders, files)
        if not self._all():
            raise ConfigError(f"{root} holds no checkpoint, artifact or publication.")
        # an increment comes after what it adds to, whichever folder either lies in
        by_step = sorted(self.checkpoints.items(), key=lambda one: one[1].manifest.step)
        self.checkpoints = dict(by_step)

    def check_exports(self, now: StoredFolders) -> None:
        """Check that no artifact has come since the folder was looked through.

        Args:
            now: what the folder holds now.
        Raises:
            ConfigError: one has.
        """
        for path, artifact in now.artifacts.items():
            before = self.artifacts.get(path)
            if before is None or before.manifest.sha256 != artifact.manifest.sha256:
                raise ConfigError(
                    f"{artifact.folder} came while keys were looked for, so nothing was changed. "
                    "Run this again."
                )

    def schemas(self) -> list[FeatureSchema]:
        """Return the schemas that are known."""
        return [schema for one in self._all() if (schema := one.schema()) is not None]

    def window_schemas(self) -> list[FeatureSchema]:
        """Return the schemas that windows may have, each once."""
        found = self.schemas()
        found += [s for one in self.checkpoints.values() if (s := one.stream_schema()) is not None]
        return [schema for place, schema in enumerate(found) if schema not in found[:place]]

    def tables(self) -> set[TableSize]:
        """Return the tables that are stored."""
        return {table for one in self._all() for table in one.tables()}

    def _all(self) -> list[StoredCheckpoint | StoredArtifact]:
        bases = [chain.base for chain in self.chains.values()]
        return [*self.checkpoints.values(), *self.artifacts.values(), *bases]

    def _add(self, root: Path, folder: Path, folders: list[str], files: list[str]) -> None:
        """Add what lies in a folder itself, and leave in `folders` those to go on with."""
        path = folder.relative_to(root).as_posix()
        links = [folder / name for name in (*folders, *files) if (folder / name).is_symlink()]
        if links:
            raise ConfigError(
                f"{links[0]} is a link to {links[0].resolve()}, where rows would stay. Remove it, "
                "and forget there by itself."
            )
        if folder != root and _is_run(folder):
            # its lock and its journal are its own
            raise ConfigError(f"{root} holds the folder of a run; name that: {folder}.")
        if MANIFEST in files:
            folders.clear()
            if _format_of(folder) == FORMAT:
                self.checkpoints[path] = StoredCheckpoint(folder)
            else:
                self.artifacts[path] = StoredArtifact(folder)
            return
        if _is_written(folder):
            raise ConfigError(
                f"{folder} is being written by another process, such as rayrec export. Wait for "
                "it, or end it, and run this again."
            )
        if folder.name == STREAM and any(name.startswith("window-") for name in files):
            self.windows[path] = StoredWindows(folder)
            self.windows[path].clear_unfinished()
            folders.clear()
            return
        if any(place_of(name) for name in folders):
            self.chains[path] = StoredChain(folder)
        CheckpointManager(str(folder)).clear_unfinished(-1)
        left = {name for name in folders if (folder / name).is_dir() and place_of(name) is None}
        folders[:] = sorted(left - {ERASURE})
        self.others += sorted(_others(path, files))


def _others(path: str, files: list[str]) -> Iterator[str]:
    for name in files:
        is_own = LOCK in name or ".rayrec-" in name or name.startswith(RECEIPT)
        if path == "." and is_own:
            continue
        yield name if path == "." else f"{path}/{name}"


def _is_run(folder: Path) -> bool:
    """Return True for the folder of a run: one that trains, or one that has saved."""
    if (folder / LOCK).exists():
        return True
    return (folder / EVENTS).exists() and bool(CheckpointManager(str(folder)).steps())


def _is_written(folder: Path) -> bool:
    """Return True while an export writes to a folder."""
    try:
        with folder_lock(folder) as is_alone:
            return not is_alone
    except OSError:  # nobody may look into it
        return False


def _format_of(folder: Path) -> str:
    """Return the format that a manifest says."""
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"{folder / MANIFEST} cannot be read ({error}), so nobody knows what is in {folder}. "
            "Delete that folder."
        ) from None
