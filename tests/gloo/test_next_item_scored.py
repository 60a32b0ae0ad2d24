"""Checkpoints of next-item models scored by ranks: rankings, scores of items, and best items."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli.main import main
from rayrec.data.scored import Predicted, scored_folder
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.planner import manual_plan
from rayrec.runs.next_item_predictions import BestItems, ItemScores
from rayrec.serve import Predictor, export
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.tasks import PredictTask
from tests.gloo.songs import SCHEMA, SMALL, options, rows_of, task_for, write_songs
from tests.gloo.trainers import context_of, run_task
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def songs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_songs(tmp_path_factory.mktemp("songs"))


@pytest.fixture(scope="module")
def trained(songs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, with result.json in it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    keep = (f"run.storage_path={folder.parent}", "run.name=run", "run.steps=40")
    result = ["--result", str(folder.parent / "result.json")]
    words = ("model.model=hstu", "model.times=times")
    assert main([*options(songs, *words, *keep), *result]) == 0
    return folder


def test_a_checkpoint_is_ranked_as_its_run_ranked_it(
    trained: Path, songs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, saved = tmp_path / "evaluated.json", str(trained / "step-00000040")
    capsys.readouterr()
    asked = ["evaluate", saved, "--data", str(songs), "--local", "--global-batch-size", "40"]
    assert main([*asked, "--result", str(told)]) == 0
    result = json.loads((trained.parent / "result.json").read_text())
    # without the baselines, which are counted in the training rows
    scores = {name: result[name] for name in ("model kept", "model masked", "queries")}
    assert json.loads(told.read_text())["eval"] == scores
    line = f"seen masked, model: hr@1 {scores['model masked']['hr@1']:.4f}"
    assert f"{saved} at step 40: {line}" in capsys.readouterr().out


def test_ranks_write_what_an_artifact_answers(trained: Path, songs: Path, tmp_path: Path) -> None:
    saved, rows = str(trained / "step-00000040"), rows_of(101, 101)
    export(saved, tmp_path / "served", types="fp32")
    predictor = Predictor.load(tmp_path / "served")
    asked = ["predict", saved, "--local", "--batch-size", "30", "--columns", "past"]
    assert main([*asked, "--data", str(songs), "--out", str(tmp_path / "own")]) == 0
    own = pq.read_table(tmp_path / "own")
    assert own["past"].to_pylist() == rows["past"].to_pylist()
    close = {"rtol": 1e-5, "atol": 1e-5}
    wanted = predictor.predict(rows)
    torch.testing.assert_close(torch.tensor(own["score"].to_pylist()), wanted, **close)
    # rows whose best items are asked for need no item
    users = rows.drop_columns(["item"])
    pq.write_table(users, tmp_path / "users.parquet")
    asked += ["--data", str(tmp_path / "users.parquet"), "--k", "7"]
    for word in ([], ["--masked"]):
        out = tmp_path / f"lists{len(word)}"
        assert main([*asked, "--out", str(out), *word]) == 0
        found, best = pq.read_table(out), predictor.predict_top(users, 7, bool(word))
        assert found["item"].to_pylist() == best["item"].tolist()
        scores = torch.tensor(found["score"].to_pylist())
        torch.testing.assert_close(scores, best["score"], **close)


def predict(rank: int, ranks: int, task: PredictTask) -> Predicted | None:
    return task.run(context_of(rank, ranks))


def test_ranks_predict_as_one(ranks: RankPool, songs: Path, tmp_path: Path) -> None:
    task = task_for(songs, SMALL, 1, "table_wise")
    saves = CheckpointConfig(every_n_steps=20)
    spec = replace(task.spec, checkpoint=saves, run_path=str(tmp_path / "run"))
    ranks.run(1, run_task, replace(task, spec=spec))
    held_out = task.scorer.held_out
    recipe = replace(task.spec.model, counts=None)
    for number, scorer in enumerate((ItemScores(), BestItems(k=9, masked=True, seen="seen"))):
        tables = []
        for world_size, kind in ((1, "table_wise"), (2, "column_wise"), (4, "row_wise")):
            plan = manual_plan(find_tables(recipe), kind, Topology.local(world_size))
            folder = scored_folder(
                tmp_path / f"{number}-{world_size}", held_out, ["past"], scorer.outputs
            )
            own = replace(spec, model=recipe, plan=plan, eval_data=held_out, run_path=None)
            wanted = PredictTask(
                spec=own, checkpoint=f"{spec.run_path}/step-00000020", folder=folder, scorer=scorer
            )
            done = ranks.run(world_size, predict, wanted)
            assert {one.rows for one in done} == {101}
            tables.append(pq.read_table(folder.path).to_pydict())
        for table in tables[1:]:
            assert table["past"] == tables[0]["past"]
            assert table.get("item") == tables[0].get("item")
            assert np.allclose(table["score"], tables[0]["score"], atol=1e-5)


@pytest.mark.parametrize(
    "words, said",
    [
        ("predict --out {out} --k 41", "--k 41 is longer than a list of all 40 items"),
        ("predict --out {out} --masked", "--masked is about the lists of --k"),
        ("predict --out {out}.parquet --k 3", "is one file, and lists go to a folder"),
        ("predict --out {out}.parquet", "a next-item model reads no labels; name a folder"),
        ("predict --out {out} --k 3 --columns item", "column 'item' has the name of the scores"),
        ("evaluate --where item>99", "no rows where item > 99"),
        ("evaluate --schema {other}", "history 'history' and item 'item' are to be features of"),
    ],
)
def test_what_ranks_do_not_predict_is_said_in_one_line(
    trained: Path,
    songs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    said: str,
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(SCHEMA).replace('"history"', '"past_items"'))
    command, *rest = words.format(out=tmp_path / "out", other=other).split()
    assert (
        main([command, str(trained / "step-00000040"), "--data", str(songs), "--local", *rest]) == 2
    )
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and err.count("\n") == 1
