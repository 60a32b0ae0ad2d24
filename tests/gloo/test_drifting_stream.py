"""Streams of planted rows whose ids are born and die: each window tells its best AUC."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from rayrec.cli.main import main
from rayrec.errors import ConfigError
from rayrec.streams import StreamConfig, StreamDataset
from tests.data.stream_files import SCHEMA, amounts, config_of, cut, cutter_of, rows_of


def pairs_won(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of pairs of a click and none that the logits put in order."""
    clicks, others = logits[labels == 1][:, None], logits[labels == 0][None, :]
    return float(((clicks > others) + 0.5 * (clicks == others)).mean())


def test_each_window_of_a_run_has_its_best_auc(tmp_path: Path) -> None:
    made, runs = tmp_path / "made", tmp_path / "runs"
    words = ["--rows", "5000", "--eval-rows", "100", "--lifetime", "2000", "--dim", "4"]
    assert main(["make-data", str(made), *words]) == 0
    keys = [f"data.schema={made}/schema.json", f"data.stream.folder={made}/train"]
    keys += ["data.stream.truth=true_logit", "data.stream.rows=2000"]
    keys += ["data.stream.stop_after_rows=5000", "run.shuffle=false", "run.progress=off"]
    keys += [f"run.storage_path={runs}", "run.name=run", "run.global_batch_size=256"]
    assert main(["train", "--local", *(w for key in keys for w in ("--set", key))]) == 0

    rows = pa.concat_tables(map(pq.read_table, sorted((made / "train").glob("*.parquet"))))
    logits, labels = rows["true_logit"].to_numpy(), rows["label"].to_numpy()
    events = [json.loads(line) for line in (runs / "run" / "events.jsonl").open()]
    windows = [event for event in events if event["event"] == "stream"]
    assert [one["rows"] for one in windows] == [2000, 2000, 1000]
    for first, one in zip((0, 2000, 4000), windows, strict=True):
        own = slice(first, first + one["rows"])
        assert one["best_auc"] == pytest.approx(pairs_won(logits[own], labels[own]), abs=1e-12)
    scores = [e["scores"]["auc"] for e in events if e["event"] == "evaluation"]
    assert all(s < one["best_auc"] for s, one in zip(scores, windows, strict=True))

    page = tmp_path / "page.html"
    assert main(["report", str(runs / "run"), "--out", str(page)]) == 0
    assert "best possible of windows" in page.read_text()


def test_rows_without_a_truth_are_refused(tmp_path: Path) -> None:
    incoming = tmp_path / "in"
    incoming.mkdir()
    rows = rows_of(0, 4)
    whole = rows.append_column("truth", pa.array([0.5, -1.0, 2.0, 0.0]))
    pq.write_table(whole, incoming / "1.parquet")
    pq.write_table(
        rows_of(4, 2).append_column("truth", pa.array([None, 1.0])), incoming / "2.parquet"
    )
    pq.write_table(rows_of(6, 2), incoming / "3.parquet")
    texts = pc.cast(whole["truth"].slice(0, 2), pa.string())
    pq.write_table(rows_of(8, 2).append_column("truth", texts), incoming / "4.parquet")
    cutter = cutter_of(tmp_path / "run", config_of(incoming, rows=100, truth="truth"))
    window = cut(cutter, 0)
    cutter.close()
    assert window is not None and amounts(tmp_path / "run", window) == [0, 1, 2, 3, 5]
    assert window.refused == 5


def test_one_label_has_a_truth() -> None:
    schema = replace(SCHEMA, label=("label", "other"))
    with pytest.raises(ConfigError, match=r"a stream with data\.stream\.truth takes one"):
        StreamDataset(config=StreamConfig(folder="in", truth="truth"), schema=schema)
