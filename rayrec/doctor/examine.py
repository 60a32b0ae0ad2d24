"""`examine`: the report on a checkpoint, on a run's newest checkpoint, or on an artifact."""

from __future__ import annotations

import json
import os

from rayrec.checkpoint import CheckpointManager, checkpoint_path
from rayrec.checkpoint.manifest import FORMAT, MANIFEST
from rayrec.checkpoint.store import Store
from rayrec.doctor.artifact_tables import artifact_tables
from rayrec.doctor.checkpoint_tables import checkpoint_tables
from rayrec.doctor.findings import findings_on
from rayrec.doctor.table_health import DoctorReport
from rayrec.errors import CheckpointError, ConfigError
from rayrec.serve.artifact import local_folder
from rayrec.serve.manifest import Manifest


def examine(path: str | os.PathLike[str]) -> DoctorReport:
    """Read all tables at a path once, and return their numbers and findings.

    Args:
        path: a run's folder, whose newest checkpoint is taken; RUN@latest, RUN@best, or the folder
            of a checkpoint; or the local folder of an artifact.
    Raises:
        ConfigError: there is none of these.
        CheckpointError, DamagedCheckpointError: a checkpoint cannot be read, or is damaged.
        ArtifactError: an artifact cannot be read, or is damaged.
        InputError: a line of the run's events is broken.
    Cost: one pass over the tables; two more over the ids of a run's dynamic tables, where it has
        three checkpoints.
    """
    folder = checkpoint_path("PATH", path)
    if not Store(folder).has_manifest():
        folder = _newest(folder)
    if _is_artifact(folder):
        manifest = Manifest.read_file(local_folder("the artifact", folder))
        tables, step, parity = artifact_tables(folder, manifest), manifest.step, manifest.parity
    else:
        (tables, step), parity = checkpoint_tables(folder), None
    found = [one for table in tables for one in findings_on(table)]
    return DoctorReport(
        path=folder,
        kind="checkpoint" if parity is None else "artifact",
        step=step,
        tables=tuple(tables),
        findings=tuple(sorted(found, key=lambda one: not one.is_grave)),
        parity=parity or {},
    )


def _newest(run: str) -> str:
    """Return the newest checkpoint of a run's folder, which must have one."""
    try:
        newest = CheckpointManager(run).latest()
    except CheckpointError:
        newest = None
    if newest is None:
        raise ConfigError(
            f"{run} is neither a run with a checkpoint, nor a checkpoint, nor an artifact. Name "
            "one of them; of a folder of publications, name one of its bases."
        )
    return newest


def _is_artifact(folder: str) -> bool:
    """Return True unless a manifest says that it is a checkpoint's, or is no JSON."""
    try:
        said = json.loads(Store(folder).read_all(MANIFEST))
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("format") not in (FORMAT, None)
