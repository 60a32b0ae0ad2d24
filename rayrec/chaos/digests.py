"""A digest per table of a checkpoint, and one of the dense part, to compare final states by."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa

from rayrec.checkpoint import CheckpointManager, load_table, read_manifest
from rayrec.errors import ConfigError

# no table has such a name
DENSE, STEP = "the dense part", "the last step"


def digests(folder: str) -> dict[str, str]:
    """Return the digests of the newest checkpoint of a run.

    Rows and optimizer state count by row number, however the table was cut into files. Costs a
    read of the checkpoint, with one table in memory at a time.

    Args:
        folder: the run's folder.
    Returns:
        digest by table, that of the dense layers with their optimizer as `DENSE`, and `STEP`.
    Raises:
        ConfigError: the run left no checkpoint.
        CheckpointError: the checkpoint is damaged.
    """
    path = CheckpointManager(folder).latest()
    if path is None:
        raise ConfigError(
            "the job ended without a checkpoint, so there are no tables to compare; let it save at "
            "its end, into the folder that --checkpoint-dir names."
        )
    manifest = read_manifest(path)
    told = {entry.name: _table(load_table(path, entry.name)) for entry in manifest.tables}
    dense = (Path(path) / manifest.dense.path).read_bytes()
    return {**told, DENSE: hashlib.sha256(dense).hexdigest()[:16], STEP: str(manifest.step)}


def _table(rows: pa.Table) -> str:
    digest = hashlib.sha256()
    for name in rows.column_names:
        digest.update(name.encode())
        for chunk in rows.column(name).chunks:
            flat = chunk.flatten() if pa.types.is_fixed_size_list(chunk.type) else chunk
            digest.update(flat.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()[:16]
