"""Clicks of users whose ids have 64 bits, come and go, and the schema of their dynamic table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 1500
RULE = {"blocks": 4, "admission_threshold": 2, "counter_capacity": 96, "ttl_steps": 5}
# the last stream of the data has 16 rows of a batch, which are seconds
TIMED = {"blocks": 4, "admission_threshold": 2, "eviction": "timestamp", "ttl_s": 50}
TABLE = {"name": "t_user", "num_embeddings": 64, "embedding_dim": 8, "features": ["user"]}


def write(folder: Path, table: dict[str, Any], text: bool = False) -> Path:
    """Clicks of users with numbers of 64 bits, or names, whose favourites move on, a click a
    second, but for some late ones; the schema has the time where the table asks for it.
    """
    rng = np.random.default_rng(0)
    names = rng.integers(-(2**63), 2**63 - 1, 400)
    at = (np.arange(ROWS) // 10 + rng.zipf(1.5, ROWS)) % 400
    label = (names[at] % 3 == 0).astype(np.int8)
    users = [f"user {name}" for name in names[at]] if text else names[at]
    rows = pa.table({"label": label, "d": rng.random(ROWS), "user": users})
    seconds = 1_700_000_000 + np.arange(ROWS)
    seconds[1380:1420] -= 5000
    at = pa.array(seconds * 1000 + rng.integers(0, 1000, ROWS), pa.timestamp("ms"))
    rows = rows.append_column("at", at)
    schema: dict[str, Any] = {
        "label": "label",
        "dense": ["d"],
        "features": [{"name": "user", "column": "user"}],
    }
    rule = table.get("dynamic", {})
    if "ttl_s" in rule or rule.get("eviction") == "timestamp":
        schema["time"] = "at"
    for part in ("train", "eval"):
        (folder / part).mkdir(parents=True)
        pq.write_table(rows, folder / part / "part.parquet")
    (folder / "schema.json").write_text(json.dumps(schema | {"tables": [table]}))
    return folder
