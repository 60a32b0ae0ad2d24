"""Keys are forgotten in the folder of a run whose table or publications changed on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import CheckpointManager, load_table
from rayrec.erasure.forget import forget
from rayrec.train import CheckpointConfig, PublishConfig
from tests.dynamic_clicks import TABLE, write
from tests.gloo.trainers import begin_and_run, spec_of

STEPS = 4
RULE = {"dynamic": {"blocks": 4}}


def live(folder: Path, life: int, table: dict[str, Any], publish: str | None) -> str:
    """Train some steps more, on users that are numbers of any size but for a static table; the
    path of the last checkpoint.
    """
    data = write(folder / f"data-{life}", TABLE | table)
    if "dynamic" not in table:
        path = data / "train" / "part.parquet"
        rows = pq.read_table(path)
        place = rows.schema.get_field_index("user")
        few = pa.array(np.asarray(rows["user"]) % TABLE["num_embeddings"])
        pq.write_table(rows.set_column(place, "user", few), path)
    manager = CheckpointManager(str(folder / "run"))
    spec = spec_of(data, 1)
    spec = replace(
        spec,
        steps=STEPS * (life + 1),
        run_path=str(folder / "run"),
        extras=spec.model.to_extras(),
        checkpoint=CheckpointConfig(every_n_steps=STEPS),
        publish=None if publish is None else PublishConfig(every_n_steps=1, dtype=publish),
        resume_from=(manager.path(STEPS * life),) if life else (),
        new_data=True,
    )
    begin_and_run(spec)
    return manager.path(spec.steps)


def keys_of(path: str) -> set[int]:
    return set(load_table(path, "t_user")["id_key"].to_pylist()) - {-1}


def check_forgotten(folder: Path, path: str) -> None:
    """Two keys that the last checkpoint has, of which one is any number, leave all files."""
    known = sorted(keys_of(path))
    keys = [known[0], known[len(known) // 2]]
    assert keys[0] < 0
    pq.write_table(pa.table({"user": keys}), folder / "keys.parquet")
    (receipt, _) = forget(folder / "run", folder / "keys.parquet")
    assert [(table.found, table.found_now) for table in receipt.tables] == [(2, 0)]
    assert keys_of(path) == set(known) - set(keys)
    told = [np.int64(key).tobytes() for key in keys]
    files = [file.read_bytes() for file in (folder / "run").rglob("*") if file.is_file()]
    assert files and not [one for one in told for content in files if one in content]


LIVES = [(RULE, RULE | {"num_embeddings": 128}), (RULE | {"num_embeddings": 128}, RULE), ({}, RULE)]
NAMES = "larger", "smaller", "was static"


@pytest.mark.parametrize("tables", LIVES, ids=NAMES)
def test_a_key_is_an_id_of_a_table_of_any_size(
    tmp_path: Path, tables: tuple[dict[str, Any], ...]
) -> None:
    for life, table in enumerate(tables):
        path = live(tmp_path, life, table, None)
    check_forgotten(tmp_path, path)


@pytest.mark.parametrize("tables", LIVES, ids=NAMES)
def test_publications_are_read_by_the_base_that_they_add_to(
    tmp_path: Path, tables: tuple[dict[str, Any], ...]
) -> None:
    for life, table in enumerate(tables):
        path = live(tmp_path, life, table, ("int8", "fp16")[life])
    check_forgotten(tmp_path, path)
