"""Streams under real faults, and from a producer through two ranks to a server that is asked.

Each command runs in a process of its own, as a user would have it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data.synthetic import SyntheticPaths
from tests.leftovers import processes_with
from tests.ray.heads import ROOT
from tests.unit.served_processes import Server, following, wait_for
from tests.words import sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEW = 10**12  # an item that nothing has been seen of when the run begins


def environment(mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", name: value}


def test_a_stream_run_under_faults_ends_with_the_same_tables(
    clicks: SyntheticPaths, tmp_path: Path, mark: str
) -> None:
    incoming, out = tmp_path / "in", tmp_path / "out.json"
    incoming.mkdir()
    rows = pa.concat_tables(map(pq.read_table, sorted(clicks.train.glob("*.parquet"))))
    for k in range(200):
        # 40,000 rows, in files of 200
        pq.write_table(rows.slice(k * 200 % 5800, 200), incoming / f"part-{k:05d}.parquet")
    job = [sys.executable, "-m", "jobs.train_dlrm", "--ranks", "2", "--plan", "row_wise"]
    job += ["--checkpoint-dir", str(tmp_path / "runs")]
    job += sets(
        f"data.schema={clicks.schema}",
        f"data.stream.folder={incoming}",
        "data.stream.rows=2000",
        "data.stream.stop_after_windows=20",
        "run.global_batch_size=64",
        "run.heartbeat_timeout_s=5",
        "run.checkpoint.every_n_steps=25",
        "run.checkpoint.num_to_keep=2",
    )
    chaos = [sys.executable, "-m", "rayrec.cli.main", "chaos", "--every", "4s", "--driver"]
    chaos += ["--faults", "3", "--seed", "5", "--out", str(out), "--", *job]
    env = environment(mark)
    done = subprocess.run(chaos, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    (run,) = told["runs"]
    assert sorted(blow["kind"] for blow in run["blows"]) == ["KILL", "STOP", "driver"]
    assert run["verdict"] == "same tables" and run["digests"] == told["calm"]["digests"]
    # twenty windows of 31 steps of 64 rows and one of 16
    assert run["digests"]["the last step"] == "640"
    wait_for(lambda: not processes_with(mark), 30)


def write_schema(folder: Path) -> Path:
    table = {"name": "t_item", "num_embeddings": 256, "embedding_dim": 8, "features": ["item"]}
    schema = {
        "label": "label",
        "dense": ["d"],
        "features": [{"name": "item", "column": "item"}],
        "tables": [{**table, "dynamic": {"blocks": 4}}],
    }
    path = folder / "schema.json"
    path.write_text(json.dumps(schema))
    return path


def put(folder: Path, number: int, items: np.ndarray, labels: np.ndarray) -> None:
    """Put a file of a stream into a folder as a producer does: aside, and then renamed."""
    count = len(items)
    now = pa.array(np.full(count, int(time.time())))
    dense = np.zeros(count, np.float32)
    rows = pa.table({"label": labels.astype(np.int8), "d": dense, "item": items, "at": now})
    aside = folder / f"_part-{number:05d}.parquet"
    pq.write_table(rows, aside)
    aside.rename(folder / f"part-{number:05d}.parquet")


def score(server: Server, item: int) -> float:
    body = json.dumps({"rows": [{"d": 0.0, "item": item}]}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{server.http_port}/predict", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=30) as said:
        answer = json.load(said)
    return float(answer["scores"][0])


def test_an_item_that_is_new_is_scored_by_what_was_learned_within_seconds(
    tmp_path: Path, mark: str
) -> None:
    """Items of even numbers are clicked; the new one is, too, and no file names it at first."""
    incoming, rng = tmp_path / "in", np.random.default_rng(0)
    incoming.mkdir()
    for number in range(4):
        items = rng.integers(0, 40, 1000)
        put(incoming, number, items, items % 2 == 0)
    words = [sys.executable, "-m", "rayrec.cli.main", "train", "--ranks", "2"]
    words += sets(
        f"data.schema={write_schema(tmp_path)}",
        f"data.stream.folder={incoming}",
        "data.stream.rows=1000",
        "data.stream.seconds=0.5",
        "data.stream.time=at",
        "run.global_batch_size=100",
        "run.sparse_optimizer.lr=0.5",
        "run.report_every_s=0.5",
        f"run.storage_path={tmp_path}/runs",
        "run.name=live",
        "run.publish.every_s=1.0",
    )
    log = (tmp_path / "log").open("w")
    run = subprocess.Popen(words, cwd=ROOT, env=environment(mark), stdout=log, stderr=log)
    try:
        folder = tmp_path / "runs" / "live"
        wait_for(lambda: list(folder.glob("published/base-*")) or run.poll() is not None, 300)
        assert run.poll() is None, (tmp_path / "log").read_text()
        with following(folder) as server:
            wait_for(lambda: score(server, 2) > 0.7 and score(server, 1) < 0.3)
            # two that are unknown have one score
            before = score(server, NEW)
            assert before == score(server, NEW + 1)
            put(incoming, 4, np.full(1000, NEW), np.ones(1000))
            written = time.monotonic()
            wait_for(lambda: score(server, NEW) > max(0.7, before + 0.05), 60)
            seconds = time.monotonic() - written
            for name in ("event_", "ingest_", ""):
                age = server.number(f"rayrec_serve_{name}staleness_seconds")
                assert 0 <= age < seconds + 60
        run.terminate()
        assert run.wait(120) == 143, (tmp_path / "log").read_text()
    finally:
        run.kill()
        run.wait()
        log.close()
    assert seconds < 60
    wait_for(lambda: not processes_with(mark), 60)
