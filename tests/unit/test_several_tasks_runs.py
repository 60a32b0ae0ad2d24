"""Runs of MMoE and PLE by a run file: trained, scored, exported and served, task by task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli.main import main
from rayrec.data import FeatureSchema
from rayrec.metrics import BinaryMetrics
from rayrec.serve import Predictor
from tests.clicks import LEARNABLE, write_clicks
from tests.unit.running_replica import running

NAMES = ["click", "like", "stars", "genre"]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums of batches of other sizes
OPTIONS = {
    "mmoe": "shared_experts = 4",
    "ple": "shared_experts = 2\ntask_experts = 1\nextraction_layers = 2",
}
RUN = """
[model]
model = "{model}"
dense_layers = [8]
over_layers = [8]
expert_layers = [8]
{options}
[data]
train = "{data}/train"
eval = "{data}/eval"
schema = "{data}/schema.json"
[scaling]
num_workers = 0
[run]
global_batch_size = 128
steps = 60
storage_path = "{out}"
evaluation = {{ every_n_steps = 30, score = "like/auc" }}
publish = {{ every_n_steps = 30, dtype = "fp32" }}
[[run.tasks]]
name = "click"
[[run.tasks]]
name = "like"
[[run.tasks]]
name = "stars"
kind = "regression"
weight = 0.5
[[run.tasks]]
name = "genre"
kind = "multiclass"
classes = 3
metrics = ["recall@2"]
"""


def planted(folder: Path) -> Path:
    """Clicks with three further labels that follow from the first id, with some noise."""
    write_clicks(folder, rows_train=4000, rows_eval=500, **LEARNABLE)
    schema = json.loads((folder / "schema.json").read_text())
    random = np.random.default_rng(7)
    for part in ("train", "eval"):
        for file in sorted((folder / part).glob("*.parquet")):
            rows = pq.read_table(file)
            ids = rows["cat_0"].to_numpy()
            noise = random.random(len(ids))
            likes = np.where(noise < 0.1, 1 - ids % 2, ids % 2)
            rows = rows.append_column("like", pa.array(likes))
            rows = rows.append_column("stars", pa.array(ids % 5 + noise))
            rows = rows.append_column("genre", pa.array(ids % 3))
            pq.write_table(rows, file)
    schema["label"] = [schema["label"], "like", "stars", "genre"]
    (folder / "schema.json").write_text(json.dumps(schema))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("data"))


def file_of(folder: Path, data: Path, model: str) -> Path:
    text = RUN.format(model=model, options=OPTIONS[model], data=data, out=folder / "runs")
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def auc_of(rows: pa.Table, label: str, scores: np.ndarray) -> float:
    metrics = BinaryMetrics()
    logits = torch.logit(torch.from_numpy(scores).double())
    metrics.update(logits, torch.from_numpy(rows[label].to_numpy()).double())
    return metrics.compute().auc


@pytest.mark.parametrize("model", ["mmoe", pytest.param("ple", marks=pytest.mark.slow)])
def test_a_run_is_scored_exported_and_served_by_task(model, data, tmp_path, capsys):
    told = tmp_path / "result.json"
    assert main(["train", str(file_of(tmp_path, data, model)), "--result", str(told)]) == 0
    shown = capsys.readouterr().out
    assert all(f"\nevaluation: {name}  " in shown for name in NAMES)
    assert "evaluation: genre  recall@2 " in shown and "evaluation: stars  mse " in shown
    result = json.loads(told.read_text())
    scores, checkpoint = result["eval"], result["checkpoint"]
    # planted: a tenth of the likes is turned round, stars have the variance 2 of their ids
    assert scores["like/auc"] > 0.8 and scores["genre/accuracy"] > 0.6
    assert scores["stars/mse"] < 1.2

    folder = str(Path(checkpoint).parent)
    events = map(json.loads, Path(folder, "events.jsonl").read_text().splitlines())
    scored = [event for event in events if event["event"] == "evaluation"]
    assert [event["rows"] for event in scored] == [500, 500, 500] and scored[-1]["final"]
    assert main(["report", folder, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "like/auc" in page and "stars/mse" in page

    line = ["evaluate", checkpoint, "--data", str(data), "--local", "--result", str(told)]
    assert main(line) == 0
    assert f"{checkpoint} at step 60: like  auc " in capsys.readouterr().out
    again = json.loads(told.read_text())["eval"]
    # what a run asks for beside the usual scores is not in its checkpoint
    assert again == pytest.approx({k: v for k, v in scores.items() if "@" not in k})

    eval_rows = pq.read_table(data / "eval")
    wanted = predicted(["--data", str(data), "--local"], checkpoint, tmp_path / "of_checkpoint")
    assert auc_of(eval_rows, "like", wanted["like"]) == pytest.approx(scores["like/auc"], abs=1e-3)
    assert wanted["genre"].shape == (500, 3)
    squares = (wanted["stars"] - eval_rows["stars"].to_numpy()) ** 2
    assert squares.mean() == pytest.approx(scores["stars/mse"], rel=1e-3)

    out = tmp_path / "served"
    assert main(["export", checkpoint, str(out), "--dtype", "fp32", "--data", str(data)]) == 0
    assert "no torch.export program" not in capsys.readouterr().out
    alike(predicted(["--data", str(data)], str(out), tmp_path / "of_artifact"), wanted)
    columns = FeatureSchema.load(str(data / "schema.json")).columns(with_labels=False)
    asked = eval_rows.select(list(columns))
    predictor = Predictor.load(out, trusted=False)
    alike({name: one.numpy() for name, one in predictor.predict(asked).items()}, wanted)
    followed = Predictor.follow(folder)
    assert followed.step == 60
    alike({name: one.numpy() for name, one in followed.predict(asked).items()}, wanted)
    with running(predictor) as server, server.client() as client:
        alike(client.predict(asked), wanted)  # gRPC
        status, said, _ = server.http("/predict", {"rows": asked.to_pylist()})
        assert status == 200
        alike({name: np.array(one) for name, one in said["scores"].items()}, wanted)


def predicted(line: list[str], model: str, out: Path) -> dict[str, np.ndarray]:
    """Scores that `rayrec predict` writes, by task."""
    assert main(["predict", model, *line, "--out", str(out)]) == 0
    rows = pq.read_table(out)
    assert rows.column_names[-4:] == NAMES
    return {name: np.array(rows[name].to_pylist()) for name in NAMES}


def alike(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(got) == NAMES
    for name in NAMES:
        np.testing.assert_allclose(got[name], wanted[name], **CLOSE)


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        ("mmoe", "run.tasks=[{name='a'},{name='b'}]", "the labels ['label', 'like', 'stars'"),
        ("ple", "run.tasks=[{name='a'}]", "'ple' predicts several tasks and has 1"),
        ("ple", "run.tasks=[]", "'ple' predicts several tasks and has 0"),
        ("mmoe", "model.task_experts=2", "task_experts would have no effect: it is of model 'ple'"),
        ("mmoe", "model.cross_layers=3", "it is of model 'dcn', and the run's is 'mmoe'"),
        ("mmoe", "model.expert_layers=[]", "expert_layers is empty"),
        ("ple", "model.tasks=[{name='a'}]", "tasks"),
    ],
)
def test_a_mistake_is_found_before_training(model, change, says, data, tmp_path, capsys):
    file = file_of(tmp_path, data, model)
    assert main(["train", str(file), "--set", change]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and says in said.err and said.err.count("\n") == 1
    assert not list((tmp_path / "runs").rglob("step-*"))


def test_models_of_one_task_name_those_of_several(data, tmp_path, capsys):
    text = file_of(tmp_path, data, "mmoe").read_text()
    for option in ("expert_layers = [8]", "shared_experts = 4"):
        text = text.replace(option, "")
    (tmp_path / "run.toml").write_text(text.replace('"mmoe"', '"dcn"'))
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    assert "'dcn' predicts one binary task" in (error := capsys.readouterr().err)
    assert "train mmoe or ple" in error


def test_rows_that_are_made_have_one_label(capsys):
    line = ["train", "--set", "data.planted={}", "--set", "model.model=mmoe"]
    assert main([*line, "--set", "run.tasks=[{name='a'},{name='b'}]"]) == 2
    said = capsys.readouterr()
    assert "planted makes rows of one label" in said.err and "making" not in said.out


def test_a_printed_run_is_read_again(data, tmp_path, capsys):
    file = file_of(tmp_path, data, "ple")
    assert main(["train", str(file), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "task_experts = 1" in printed
    (tmp_path / "printed.toml").write_text(printed)
    assert main(["train", str(tmp_path / "printed.toml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
