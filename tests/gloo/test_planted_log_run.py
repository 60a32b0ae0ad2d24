"""Runs on a planted event log: a model of histories beats one without, and regrets are told."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli.main import main
from rayrec.data import PlantedLogConfig, write_planted_log
from rayrec.metrics import BinaryMetrics, PlantedScores
from rayrec.serve import Predictor
from tests.words import sets

CONFIG = PlantedLogConfig(
    events=40_000, users=400, items=20, days=10, history=6, dim=8, affinity=1.8
)


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plays")
    write_planted_log(folder, CONFIG)
    # the same without the history, pooled, for a model that reads none
    schema = json.loads((folder / "schema.json").read_text())
    schema["features"] = [one for one in schema["features"] if "history" not in one]
    del schema["user"], schema["time"]
    for table in schema["tables"]:
        table |= {"pooling": "sum", "features": [f for f in table["features"] if f != "history"]}
    (folder / "without.json").write_text(json.dumps(schema))
    return folder


def trained(folder: Path, schema: str, *changes: str) -> dict[str, Any]:
    """The result of a run on one rank in this process."""
    log, result = f"{folder}/log", folder / "result.json"
    usual = [f"data.train={log}", f"data.schema={folder}/{schema}", "scaling.num_workers=0"]
    words = sets(*usual, "run.progress=off", "run.sparse_optimizer.lr=0.1", *changes)
    assert main(["train", "--result", str(result), *words]) == 0
    told: dict[str, Any] = json.loads(result.read_text())
    return told


DIN = ["model.model=din", "model.attention_layers=[]", "run.global_batch_size=256"]


def held_out(folder: Path) -> list[str]:
    where = "data.where=split == 'train'"
    return [where, f"data.eval={folder}/log", "data.eval_where=split=='test'"]


def test_din_beats_a_model_without_history(plays: Path) -> None:
    plain = trained(plays, "without.json", *held_out(plays), "run.global_batch_size=256")["eval"]
    din = trained(plays, "schema.json", *held_out(plays), *DIN, "run.epochs=2")["eval"]
    truth = PlantedScores.load(plays / "truth.json")
    (test,) = (part for part in truth.parts if part.where == "split == 'test'")
    for scores in (plain, din):
        assert (scores["rows"], scores["bayes_auc"]) == (test.rows, test.bayes_auc)
        assert scores["regret"] == pytest.approx(test.bayes_auc - scores["auc"])
    assert din["auc"] > plain["auc"] + 0.05 and 0 < din["regret"] < 0.04


@pytest.mark.slow
def test_each_day_is_told_beside_its_best_score(
    plays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = ["data.windows.column=day", "data.windows.start=5"]
    truth = PlantedScores.load(plays / "truth.json")
    best = {part.where: part for part in truth.parts}
    told = trained(plays, "schema.json", *DIN, *days)["windows"]
    assert [one["window"] for one in told] == [5, 6, 7, 8, 9]
    for one in told:
        part = best[f"day == {one['window']}"]
        assert (one["rows"], one["bayes_auc"]) == (part.rows, part.bayes_auc)
        assert one["regret"] == pytest.approx(part.bayes_auc - one["auc"])
    mean = sum(one["regret"] for one in told[1:]) / 4
    assert f"regret {mean:.5f}" in capsys.readouterr().out
    # of two days, and of a part of the rows, the truth is not known
    for changes in (["data.windows.size=2"], ["data.where=item < 10"]):
        told = trained(plays, "schema.json", *DIN, *days, *changes)["windows"]
        assert not any("regret" in one for one in told)


def test_gauc_of_each_window_is_told_and_drawn(plays: Path, tmp_path: Path) -> None:
    words = [*DIN, "run.tasks=[{name='engaged',metrics=['gauc@user']}]", "run.name=days"]
    words += ["data.windows.column=day", "data.windows.start=8", f"run.storage_path={tmp_path}"]
    told = trained(plays, "schema.json", *words, "run.checkpoint.every_n_steps=1")["windows"]
    scored = windows_of(tmp_path / "days")
    assert [event["window"] for event in scored] == [8, 9]
    found = [event["scores"]["gauc@user"] for event in scored]
    assert [one["gauc@user"] for one in told] == found
    # that of the model before it trained on the window
    checkpoint = f"{tmp_path}/days/step-{scored[1]['step']:08}"
    rows = predicted(checkpoint, plays / "log", 9, tmp_path / "out")
    # a pair may change where two scores are equal up to their rounding
    assert found[1] == pytest.approx(gauc_of(rows), abs=1e-4)

    assert main(["report", str(tmp_path / "days"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    chart = r'<figcaption>Score: gauc@user</figcaption>.*?json">(.*?)</script>'
    (drawn,) = (json.loads(one) for one in re.findall(chart, page))
    assert [one["name"] for one in drawn] == ["days, training", "days, windows before training"]
    assert drawn[1]["steps"] == [event["step"] for event in scored]
    assert drawn[1]["values"] == pytest.approx(found, rel=1e-5)
    assert "mean of 2 windows, the first left out" in page and f"gauc@user {found[1]:.4f}" in page


def windows_of(folder: Path) -> list[dict[str, Any]]:
    """The events of a run that tell of its windows."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [one for one in events if one["event"] == "evaluation" and one["window"] is not None]


def predicted(checkpoint: str, log: Path, day: int, out: Path) -> pa.Table:
    """Scores of the events of a day by a checkpoint, beside their users and labels."""
    words = ["predict", checkpoint, "--data", str(log), "--where", f"day == {day}", "--local"]
    assert main([*words, "--columns", "user,engaged", "--out", str(out)]) == 0
    return pq.read_table(out)


def gauc_of(rows: pa.Table) -> float:
    """The share of the pairs of a user that are in order, its mean over users by their rows."""
    own: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for row in rows.to_pylist():
        own[row["user"]].append((row["score"], row["engaged"]))
    weights, shares = [], []
    for scored in own.values():
        pairs = [(a > b) + (a == b) / 2 for a, yes in scored if yes for b, no in scored if not no]
        if pairs:
            weights.append(len(scored))
            shares.append(sum(pairs) / len(pairs))
    return float(np.average(shares, weights=weights))


RUN = """
[model]
model = "hstu_ranking"
[model.hstu]
width = 8
layers = 1
times = "history_time"
candidate_time = "event_time"
[data]
train = "{plays}/log"
schema = "{plays}/next_item.json"
windows = {{ column = "day", start = 7, stop = 9 }}
[scaling]
num_workers = 0
[run]
global_batch_size = 256
sparse_optimizer = {{ lr = 0.1 }}
storage_path = "{out}"
name = "run"
progress = "off"
"""


def test_hstu_of_a_run_file_is_scored_exported_and_predicts(plays: Path, tmp_path: Path) -> None:
    """Over windows, with times; lists in place of the log lead to the scores of the checkpoint."""
    told, file = tmp_path / "result.json", tmp_path / "run.toml"
    file.write_text(RUN.format(plays=plays, out=tmp_path))
    assert main(["train", str(file), "--result", str(told)]) == 0
    result = json.loads(told.read_text())
    checkpoint, windows = result["checkpoint"], result["windows"]
    assert [one["window"] for one in windows] == [7, 8]
    assert [event["scores"]["auc"] for event in windows_of(tmp_path / "run")] == [
        one["auc"] for one in windows
    ]

    day = ["--data", f"{plays}/log", "--where", "day == 9", "--local"]
    assert main(["evaluate", checkpoint, *day, "--result", str(told)]) == 0
    scores = json.loads(told.read_text())["eval"]
    assert scores["auc"] > windows[0]["auc"] + 0.05
    of_log = predicted(checkpoint, plays / "log", 9, tmp_path / "of_log")
    assert of_log.num_rows == scores["rows"]
    metrics = BinaryMetrics()
    chances, labels = (torch.tensor(of_log[name].to_pylist()) for name in ("score", "engaged"))
    metrics.update(chances.double().logit(), labels.double())
    assert metrics.compute().auc == pytest.approx(scores["auc"], abs=1e-4)
    assert metrics.compute().ne == pytest.approx(scores["ne"], rel=1e-4)

    served = str(tmp_path / "served")
    words = ["export", checkpoint, served, "--dtype", "fp32", "--data", f"{plays}/log"]
    assert main(words) == 0
    pq.write_table(with_lists(plays / "log", 9), tmp_path / "lists.parquet")
    words = ["predict", served, "--data", str(tmp_path / "lists.parquet"), "--workers", "1"]
    assert main([*words, "--out", str(tmp_path / "of_lists")]) == 0
    of_lists = pq.read_table(tmp_path / "of_lists")["score"].to_numpy()
    # float32 sums of batches of other sizes
    np.testing.assert_allclose(of_lists, of_log["score"].to_numpy(), rtol=1e-4, atol=1e-5)
    asked = Predictor.load(served).predict(pq.read_table(tmp_path / "lists.parquet"))
    np.testing.assert_allclose(asked.numpy(), of_lists, rtol=1e-4, atol=1e-5)


def with_lists(log: Path, day: int) -> pa.Table:
    """The events of a day with their histories as lists, by a dict of lists."""
    past: dict[int, list[dict[str, Any]]] = defaultdict(list)
    rows = []
    names = {"history": "item", "actions": "action", "history_time": "time"}
    for event in ds.dataset(log).to_table().to_pylist():
        before = past[event["user"]][-CONFIG.history :]
        if event["day"] == day:
            lists = {name: [one[column] for one in before] for name, column in names.items()}
            rows.append({"item": event["item"], "time": event["time"], **lists})
        past[event["user"]].append(event)
    return pa.Table.from_pylist(rows)


def test_a_next_item_model_reads_the_log(plays: Path) -> None:
    words = ["model.model=hstu", "model.times=history_time", "model.layers=1", "model.negatives=8"]
    shown = "data.where=split == 'train' and window_end == true"
    log = trained(plays, "next_item.json", *words, shown, *held_out(plays)[1:])
    # items are shown by their popularity, which a history does not tell of
    assert abs(log["model kept"]["hr@10"] - log["popularity kept"]["hr@10"]) < 0.1


@pytest.mark.slow
def test_the_mean_leaves_out_the_first_window_of_a_new_run_alone(
    plays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*DIN, "data.windows.column=day", f"run.storage_path={tmp_path}", "run.name=days"]
    mean = r"mean of (\d+) windows(, the first left out)?: auc (\S+)"
    (only,) = trained(plays, "schema.json", *run, "data.windows.start=9")["windows"]
    told = re.findall(mean, capsys.readouterr().out)
    assert told == [("1", "", f"{only['auc']:.5f}")]

    run = [*run, "run.name=resumed", "data.windows.start=7", "run.checkpoint.every_n_steps=1"]
    whole = trained(plays, "schema.json", *run)["windows"]
    told = re.findall(mean, capsys.readouterr().out)
    assert told == [("3", ", the first left out", f"{(whole[1]['auc'] + whole[2]['auc']) / 2:.5f}")]

    # amid the first window, which is scored no more
    resumed = f"run.resume_from={tmp_path}/resumed/step-00000001"
    gone_on = trained(plays, "schema.json", *run, resumed, "run.name=gone-on")["windows"]
    assert gone_on == whole[1:]
    told = re.findall(mean, capsys.readouterr().out)
    assert told == [("2", "", f"{(whole[1]['auc'] + whole[2]['auc']) / 2:.5f}")]
