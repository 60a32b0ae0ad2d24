"""`rayrec train`, `evaluate` and `predict` on small clicks, one rank in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import read_manifest
from rayrec.cli.main import main
from rayrec.driver import RunConfig, ScalingConfig
from rayrec.errors import ConfigError
from rayrec.fields import kinds
from rayrec.recipe import ModelRecipe
from rayrec.runs.retrieval import TwoTowerModel
from rayrec.runs.run_file import RunFile
from rayrec.runs.sections import DataSection
from rayrec.watch import read_events
from rayrec.watch.story import trained_s
from tests.clicks import write_clicks
from tests.dynamic_clicks import TABLE, TIMED, write

ROOT = Path(__file__).parents[2]
LOCAL = ["--set", "scaling.num_workers=0"]
SMALL = [*LOCAL, "--set", "model.dense_layers=[8]", "--set", "run.global_batch_size=256"]
SAME_EVERY_TIME = ("steps", "rows", "train_loss", "eval", "plan", "model", "seed")


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `rayrec make-data` writes it."""
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder, rows_train=1003, rows_eval=400)
    return folder


def result_of(path: Path) -> dict[str, object]:
    """What of a result does not depend on the machine."""
    told = json.loads(path.read_text())
    return {name: told[name] for name in SAME_EVERY_TIME}


def test_a_run_without_a_file_trains_and_scores(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["train", "--data", str(clicks), *LOCAL, "--set", "model.init_bound=2"]
    assert main([*line, "--result", str(tmp_path / "result.json")]) == 0
    shown = capsys.readouterr().out
    assert "\ndone: step 1, 1003 rows" in shown and "\nevaluation: auc" in shown
    assert result_of(tmp_path / "result.json")["rows"] == 1003


def test_the_table_of_options_names_keys_of_run_files() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    keys = re.findall(r"`((?:data|model|scaling|run|plan)\.[\w.]+)=", page)
    sections: dict[str, list[type]] = {
        "data": [DataSection],
        "model": [ModelRecipe, TwoTowerModel],
        "scaling": [ScalingConfig],
        "run": [RunConfig],
    }
    assert len(keys) > 50
    for key in keys:
        section, *path = key.split(".")
        assert any(has_key(kind, path) for kind in sections[section]), key


def has_key(kind: type, path: list[str]) -> bool:
    """True if a run file can say a key below a table of this type."""
    field = kinds.field_types(kind).get(path[0])
    if field is None or len(path) == 1:
        return field is not None
    takes_any = any(map(kinds.mapping_types, kinds.alternatives(field)))
    return takes_any or any(has_key(one, path[1:]) for one in kinds.variants(field))


def test_rows_that_are_said_take_the_place_of_rows_to_make(clicks: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[data.planted]\nrows_train = 7\n[run]\nseed = 4\n")
    planted = RunFile.read(str(file)).data.planted
    assert planted is not None and (planted.rows_train, planted.seed) == (7, 4)
    for data, changes in ((str(clicks), []), (None, [f"data.train={clicks}/train"])):
        read = RunFile.read(str(file), changes, data).data
        assert read.planted is None and read.train == f"{clicks}/train"
    with pytest.raises(ConfigError, match="planted makes rows of its own"):
        RunFile.read(str(file), [f"data.train={clicks}/train", "data.planted.seed=9"])


def test_the_printed_configuration_gives_the_same_run(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        f"""
[model]
model = "dcn"
dense_layers = [8]
[data]
train = "{clicks}/train"
eval = "{clicks}/eval"
schema = "{clicks}/schema.json"
[scaling]
num_workers = 0
[run]
global_batch_size = 256
epochs = 2
[[run.dense_schedule]]
policy = "linear"
max_iters = 4
[run.sparse_optimizer]
type = "Adam"
lr = 0.02
"""
    )
    change = ["--set", "run.seed=3"]
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    assert main(["train", str(run), *change, "--result", str(first)]) == 0
    capsys.readouterr()
    assert main(["train", str(run), *change, "--print-config"]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert main(["train", str(printed), "--result", str(again)]) == 0
    told = result_of(first)
    assert told == result_of(again)
    assert (told["steps"], told["model"], told["seed"]) == (8, "dcn", 3)


def test_a_checkpoint_is_scored_and_predicted(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths are those of the working directory
    result = tmp_path / "result.json"
    keep = ["--set", "run.storage_path=runs", "--set", "run.name=a", "--set", "run.steps=3"]
    train = ["train", "--data", str(clicks), *SMALL, *keep, "--result", "result.json", "--timing"]
    assert main(train) == 0
    shown = capsys.readouterr().out
    assert "start-up, by part:" in shown and f"checkpoint: {tmp_path}/runs/a/step-" in shown
    checkpoint, scores = "runs/a/step-00000003", json.loads(result.read_text())["eval"]
    for data in (clicks, clicks / "eval"):
        line = ["evaluate", checkpoint, "--data", str(data), "--local", "--result", "scores.json"]
        assert main(line) == 0
        assert json.loads(Path("scores.json").read_text())["eval"] == pytest.approx(scores)
        assert f"{checkpoint} at step 3: auc" in capsys.readouterr().out
    out = ["--out", "scores/rows.parquet", "--keys", "d_0"]
    assert main(["predict", checkpoint, "--data", str(clicks), "--local", *out]) == 0
    assert f"predictions: {tmp_path}/scores/rows.parquet" in capsys.readouterr().out
    rows, given = pq.read_table("scores/rows.parquet"), pq.read_table(clicks / "eval")
    assert rows["d_0"].to_pylist() == given["d_0"].to_pylist()
    assert rows.num_rows == 400 and all(0 < score < 1 for score in rows["score"].to_pylist())


def test_runs_are_shown_on_one_page(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        keep = ["--set", f"run.storage_path={tmp_path}", "--set", f"run.name={name}"]
        keep += ["--result", f"{tmp_path}/{name}.json"]
        assert main(["train", "--data", str(clicks), *SMALL, *keep]) == 0
    capsys.readouterr()
    told = json.loads((tmp_path / "a.json").read_text())
    assert trained_s(read_events(tmp_path / "a")) == pytest.approx(told["seconds"], rel=1e-4)
    page = tmp_path / "page.html"
    assert main(["report", f"{tmp_path}/a", f"{tmp_path}/b/events.jsonl", "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"page: {page}\n"
    text = page.read_text()
    assert text.startswith("<!doctype html>") and ">a<" in text and ">b<" in text
    assert main(["report", f"{tmp_path}/c", "--out", str(page)]) == 2
    assert f"there is no run at {tmp_path}/c" in capsys.readouterr().err


def test_where_takes_a_part_of_the_rows(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {name: pq.read_table(clicks / name)["cat_0"].to_pylist() for name in ("train", "eval")}
    few = {name: sum(value < 9 for value in values) for name, values in parts.items()}
    assert 0 < few["train"] < 1003 and 0 < few["eval"] < 400
    change = ["--set", "data.where=cat_0 < 9", "--set", "data.eval_where=not cat_0 >= 9"]
    keep = ["--set", f"run.storage_path={tmp_path}", "--result", f"{tmp_path}/result.json"]
    assert main(["train", "--data", str(clicks), *SMALL, *change, *keep]) == 0
    told = json.loads((tmp_path / "result.json").read_text())
    assert (told["rows"], told["eval"]["rows"]) == (few["train"], few["eval"])
    line = ["evaluate", told["checkpoint"], "--data", str(clicks), "--local"]
    capsys.readouterr()
    assert main([*line, "--where", "cat_0 < 9"]) == 0
    assert f"rows {few['eval']}\n" in capsys.readouterr().out
    assert main([*line, "--where", "cat_0 <"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "cat_0 <" in error and error.count("\n") == 1


def test_one_stream_takes_rows_in_the_order_of_time(tmp_path: Path) -> None:
    data = write(tmp_path / "data", TABLE | {"dynamic": TIMED})
    order = ["--set", "run.shuffle=false", "--set", "run.steps=3"]
    times = []
    for more in ([], ["--set", "data.num_streams=1"]):
        keep = ["--set", f"run.storage_path={tmp_path / str(len(more))}"]
        line = ["train", "--data", str(data), *SMALL, *order, *more, *keep]
        assert main([*line, "--result", f"{tmp_path}/result.json"]) == 0
        told = json.loads((tmp_path / "result.json").read_text())
        times.append(read_manifest(told["checkpoint"]).extras["id_times"]["t_user"])
    # eight streams begin an eighth of the rows apart
    assert times[1] == 1_700_000_000 + 3 * 256 - 1 < times[0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train", "say what to train: a run file, or --data DIR"),
        ("train --data {own}", "holds no train; name a folder that `rayrec make-data DIR` wrote"),
        ("train --set run.steps=3", "[data] needs train"),
        ("train --data {data} --set data.train=x", "so does --data. Leave one of them out"),
        ("train --data {data} --result {data}/schema.json", "over the file of [data] schema"),
        ("train --data {data} --set data.where=day<3", "'day'"),
        ("train --data {data} --set data.num_streams=0", "num_streams=0"),
        ("train --data {data} --set run.steps=x", "--set run.steps=x: [run] steps is 'x'"),
        ("train --data {data} --set plan.plan=rowwise", "neither a file nor one of"),
        ("train --data {data} --set model.model=dnn", "'dnn' is not known"),
        ("train --data {data} --set model.model=two_tower", "[model] needs query"),
        ("train --data {data} --ranks 2 --local", "--ranks is about the ranks of a cluster"),
        ("train --data {data} --checkpoint-dir s3://bucket", "names no folder for the run"),
        ("train --data {data} --set data.planted.rows_train=9", "so does --data. Leave one"),
        ("train --set data.planted={{}} --set data.train=x", "planted makes rows of its own"),
        ("train --data {data} --set run.tasks=[{{name='a'}},{{name='b'}}]", "one binary task"),
        ("evaluate {own} --data {data} --local", "manifest.json"),
        ("evaluate {own} --data {data} --local --ranks 2", "--ranks is about the ranks of"),
        ("predict {own} --data {data}/eval --out {data}/eval --local", "manifest.json"),
    ],
)
def test_a_mistake_is_found_before_training(
    line: str, says: str, clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.format(own=tmp_path, data=clicks).split()
    more = LOCAL if words[0] == "train" and len(words) > 1 else []
    assert main([*words, *more]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and says in said.err and said.err.count("\n") == 1
    assert "step 1" not in said.out and not list(tmp_path.iterdir())


def test_an_error_names_no_option_that_the_command_lacks(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = ["--set", f"run.storage_path={tmp_path}"]
    line = ["train", "--data", str(clicks), *SMALL, *keep]
    assert main([*line, "--set", "run.steps=1"]) == 0
    capsys.readouterr()
    latest = ["run.steps=2", "run.resume_from=latest"]
    for changes, says in (
        (["run.steps=2"], "resume_from='latest', or give"),
        ([*latest, "run.name=b"], "Leave out resume_from to start"),
        ([*latest, "run.seed=1"], "say new_data to keep"),
        (["run.failure.sync_every_n_steps=1"], "Give max_failures, or leave sync_every_n_steps"),
    ):
        assert main([*line, *(word for change in changes for word in ("--set", change))]) == 2
        error = capsys.readouterr().err
        assert says in error and "--" not in error.replace("--set", ""), error
