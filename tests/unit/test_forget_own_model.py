"""`rayrec forget` on the windows of a run whose model is code of the user's own, which leaves no
recipe in the checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint.manifest import Manifest
from rayrec.data import FeatureSchema
from rayrec.erasure.forget import forget
from rayrec.errors import ConfigError
from rayrec.streams import StreamConfig, StreamDataset
from rayrec.train.config import ENDLESS
from tests.forgotten_run import train, write_data
from tests.gloo.trainers import spec_of


def users(run: Path) -> list[int]:
    found = []
    for path in sorted((run / "stream").glob("*.arrow")):
        with ipc.open_file(path) as file:
            found += file.read_all()["user_id"].to_pylist()
    return found


def test_windows_lose_keys_and_are_not_passed_over(tmp_path: Path) -> None:
    data, run, keys = write_data(tmp_path / "data"), tmp_path / "run", tmp_path / "keys.parquet"
    config = StreamConfig(folder=str(data / "train"), rows=400, seconds=0.05, stop_after_windows=2)
    stream = StreamDataset(config=config, schema=FeatureSchema.load(data / "schema.json"))
    spec = spec_of(data, 1)
    train(replace(spec, data=stream, steps=ENDLESS, run_path=str(run)))
    before = users(run)
    user = before[0]
    pq.write_table(pa.table({"t_user": [user]}), keys)
    forget(run, keys)
    assert users(run) == [None if one == user else one for one in before]
    # a checkpoint of an earlier version says nothing of them
    for path in run.glob("step-*/manifest.json"):
        manifest = Manifest.from_bytes(path.read_bytes(), str(path))
        assert set(manifest.extras) >= {"stream_schema"} and "recipe" not in manifest.extras
        extras = {name: said for name, said in manifest.extras.items() if name != "stream_schema"}
        path.write_bytes(replace(manifest, extras=extras).to_bytes())
    with pytest.raises(ConfigError, match=r"windows of a stream, and no checkpoint .* 't_user'"):
        forget(run, keys)
