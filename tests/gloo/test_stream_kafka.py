"""Runs that are fed by a topic of Kafka: the tables are those of a growing folder, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.cli.main import main
from tests.clicks import write_clicks
from tests.data.kafka_cluster import cluster, ipc, send


def words_of(folder: Path, name: str, keys: dict[str, object]) -> list[str]:
    """Return the command that trains a run of four windows."""
    keys = {
        "data.schema": folder / "schema.json",
        "data.stream.rows": 300,
        "data.stream.seconds": 0.05,
        "run.storage_path": folder / "runs",
        "run.name": name,
        "run.global_batch_size": 128,
        **keys,
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return ["train", "--local", *words]


def saved(run: Path) -> dict[str, bytes]:
    """Return the files of tensors of the newest checkpoint."""
    newest = max(run.glob("step-*"))
    return {
        str(one.relative_to(newest)): one.read_bytes()
        for one in sorted(newest.rglob("*"))
        if one.is_file() and one.suffix != ".json"
    }


@pytest.mark.parametrize("form", ["arrow", "json"])
def test_a_topic_trains_to_the_tables_of_a_folder(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the run stops and goes on, while messages come in between."""
    write_clicks(tmp_path)
    rows = pa.concat_tables(map(pq.read_table, sorted((tmp_path / "train").glob("*.parquet"))))
    (tmp_path / "in").mkdir()
    pq.write_table(rows, tmp_path / "in" / "all.parquet")
    last = {"data.stream.stop_after_windows": 4, "data.stream.stop_when_idle_s": 1.0}
    assert main(words_of(tmp_path, "a", {"data.stream.folder": tmp_path / "in", **last})) == 0
    parts = [rows.slice(k, 70) for k in range(0, len(rows), 70)]
    values = [ipc(part) for part in parts]
    if form == "json":
        values = [json.dumps(row).encode() for row in rows.to_pylist()]
    with cluster() as (producer, servers):
        topic = {
            "data.stream.kafka.servers": servers,
            "data.stream.kafka.topic": "clicks",
            "data.stream.kafka.format": form,
        }
        half = len(values) * 2 // 3
        send(producer, "clicks", [(1, value) for value in values[:half]])
        some = {**topic, "data.stream.stop_after_windows": 2}
        assert main(words_of(tmp_path, "b", some)) == 0
        other = {"data.stream.folder": tmp_path / "in", "run.resume_from": "latest"}
        assert main(words_of(tmp_path, "b", other)) == 2
        why = f"was trained on topic clicks, and this run reads folder {tmp_path / 'in'}, where"
        assert why in capsys.readouterr().err
        assert main(words_of(tmp_path, "b", {**other, "run.new_data": "true"})) == 2
        assert "new_data=True begins the data anew" in capsys.readouterr().err
        batch = {**topic, **last, "run.resume_from": "latest", "run.global_batch_size": 96}
        assert main(words_of(tmp_path, "b", batch)) == 2
        told = capsys.readouterr().err
        assert "; or start a new run" in told and "new_data" not in told
        send(producer, "clicks", [(1, value) for value in values[half:]])
        rest = {**topic, **last, "run.resume_from": "latest"}
        assert main(words_of(tmp_path, "b", rest)) == 0
    wanted, found = saved(tmp_path / "runs" / "a"), saved(tmp_path / "runs" / "b")
    assert wanted and found == wanted
