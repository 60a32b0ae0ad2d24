"""Small click data with planted truth, one of whose features has lists of ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import SyntheticPaths, write_synthetic

# 1003 rows: eight steps of 128 rows, the last one ragged
TINY = SyntheticConfig(
    rows_train=1003, rows_eval=10, num_features=5, num_lists=1, num_dense=2, dim=4, cap=50, seed=1
)


def write_clicks(folder: Path, **other: int) -> SyntheticPaths:
    """Write data like `TINY`, with other numbers where given."""
    return write_synthetic(folder, replace(TINY, **other))  # type: ignore[arg-type]
