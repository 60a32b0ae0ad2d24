"""Runs of next-item models: data in, ranks, scores by full ranking out, and two runs compared."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli.main import main
from rayrec.data import FeatureSchema, ItemSlices, NextItemDataset, SharedNegatives
from rayrec.data.batch import keys_of
from rayrec.errors import ConfigError, InputError
from rayrec.metrics.bootstrap import gains, paired_bootstrap
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from rayrec.runs.inputs import open_data
from rayrec.runs.item_pairs import Pairs, check_lists, markov_scores
from rayrec.runs.next_item import check_schema
from rayrec.runs.ranked_queries import comparison, read_places
from rayrec.serve import Predictor
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.version_policy import Verdict
from rayrec.train import PublishConfig
from tests.gloo.songs import ITEMS, SCHEMA, SMALL, options, rows_of, task_for, write_songs
from tests.gloo.trainers import run_task
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def songs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_songs(tmp_path_factory.mktemp("songs"))


@pytest.mark.parametrize(
    "loss", ["sampled", "in_batch", pytest.param("full", marks=pytest.mark.slow)]
)
def test_ranks_train_and_rank_as_one(ranks: RankPool, songs: Path, loss: str) -> None:
    model = replace(SMALL, loss=loss, negatives=16 if loss == "sampled" else None)
    (one,) = ranks.run(1, run_task, task_for(songs, model, 1, "table_wise"))
    # each group of a 2D world holds all items and ranks the queries of its own
    groups = 2 if loss == "sampled" else None
    for world_size, kind, group_size in ((2, "column_wise", None), (4, "row_wise", groups)):
        task = task_for(songs, model, world_size, kind, group_size)
        found = ranks.run(world_size, run_task, task)
        assert all(rank == found[0] for rank in found)
        assert found[0].metrics["queries"] == 101
        # a place may change where two scores are equal up to their rounding
        assert found[0].metrics == pytest.approx(one.metrics, abs=0.02)


def test_a_run_learns_what_follows_what(
    songs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, folder = tmp_path / "result.json", tmp_path / "runs" / "a"
    words = ("run.epochs=25", f"run.storage_path={folder.parent}", "run.name=a")
    assert main([*options(songs, *words), "--result", str(told)]) == 0
    result = json.loads(told.read_text())
    for protocol in ("kept", "masked"):
        model, chain = result[f"model {protocol}"], result[f"markov {protocol}"]
        # a chain of items is all that there is to learn
        assert model["hr@1"] > 0.6 and chain["hr@1"] > 0.7
        assert model["hr@5"] > 3 * result[f"popularity {protocol}"]["hr@5"]
    said = capsys.readouterr().out
    assert f"seen masked, markov: hr@1 {chain['hr@1']:.4f}" in said and "101 queries" in said
    places = read_places(str(folder))
    assert (places["kept"] < 1).mean() == pytest.approx(result["model kept"]["hr@1"])
    assert (places["markov masked"] < 1).mean() == pytest.approx(chain["hr@1"])
    popular = result["popularity masked"]["hr@5"]
    assert (places["popularity masked"] < 5).mean() == pytest.approx(popular)
    both = (gains(places[name], 10)[1].mean() for name in ("masked", "markov masked"))
    first, _, line = comparison([str(folder)])
    assert first.startswith(f"{folder} less its Markov chain")
    assert f"ndcg@10 {np.subtract(*both):+.4f} [" in line
    # the history of the first row is empty: it is ranked by the biases, which popularity began
    assert places["kept"][0] == places["masked"][0] > 0


def test_a_run_goes_on_as_if_it_had_never_stopped(songs: Path, tmp_path: Path) -> None:
    results = {}
    for name, words in (
        ("whole", ("run.steps=30",)),
        ("half", ("run.steps=15",)),
        ("half", ("run.steps=30", "run.resume_from=latest")),
    ):
        out = tmp_path / f"{name}.json"
        keep = (f"run.storage_path={tmp_path}", f"run.name={name}")
        # a schedule would be another one for the run of half the steps
        still = ("run.dense_schedule.decay=constant", "run.sparse_schedule.decay=constant")
        assert main([*options(songs, *words, *keep, *still), "--result", str(out)]) == 0
        results[name] = json.loads(out.read_text())
    assert results["half"]["model masked"] == results["whole"]["model masked"]
    # the first evaluation of the half is written over
    same = list(comparison([str(tmp_path / "whole"), str(tmp_path / "half")]))
    none = "+0.0000 [+0.0000, +0.0000]"
    assert same[-2] == f"  seen kept: hr@10 {none}  ndcg@10 {none}"


SERVED = [
    ("model.model=sasrec",),
    ("model.model=hstu", "model.times=times", "model.loss=in_batch", "model.negatives=none"),
    ("model.model=gru4rec", "model.loss=full", "model.negatives=none"),
]


@pytest.mark.parametrize("words", SERVED)
def test_what_is_served_ranks_the_held_out_items_as_the_run_did(
    songs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    run, out = tmp_path / "run", str(tmp_path / "out")
    publish = "run.publish={every_n_steps=15,dtype='fp32'}"
    keep = (f"run.storage_path={tmp_path}", "run.name=run", "run.steps=40", publish)
    assert main(options(songs, *words, *keep)) == 0
    export = ["export", str(run / "step-00000040"), out, "--dtype", "fp32"]
    assert main([*export, "--data", str(songs)]) == 0
    said = capsys.readouterr().out
    assert "parity on 101 of the rows of" in said and "no torch.export program: the model" in said
    predictor, places = Predictor.load(out), read_places(str(run))
    rows = rows_of(101, 101)
    for protocol, masked in (("kept", False), ("masked", True)):
        lists = predictor.predict_top(rows.drop_columns(["item"]), ITEMS, masked)["item"]
        for past, item, own, place in zip(
            rows["past"].to_pylist(), rows["item"].to_pylist(), lists, places[protocol], strict=True
        ):
            if masked and item in past:
                assert item not in own.tolist()
            else:
                assert own.tolist().index(item) == place
    # a base and deltas lead to the same model
    folder = ChainFolder.of_run(run)
    assert [kind for _, kind in folder.places()] == ["base", "delta", "delta"]
    follower = Predictor.follow(run)
    assert follower.step == 40 and torch.equal(follower.predict(rows), predictor.predict(rows))


@pytest.mark.slow
def test_ranks_publish_as_one(ranks: RankPool, songs: Path, tmp_path: Path) -> None:
    rows, found = rows_of(101, 101), []
    for world_size, kind in ((1, "table_wise"), (2, "row_wise"), (4, "column_wise")):
        task = task_for(songs, SMALL, world_size, kind)
        path = tmp_path / str(world_size)
        publish = PublishConfig(path=str(path), every_n_steps=8, dtype="fp32")
        assert isinstance(task.spec.model, NextItemRecipe)
        extras = task.spec.model.to_extras()
        spec = replace(task.spec, publish=publish, extras=extras, run_path=f"{path}-run")
        ranks.run(world_size, run_task, replace(task, spec=spec))
        predictor = Predictor.follow(path)
        assert predictor.verdict is Verdict.CURRENT and predictor.step == 20
        found.append(predictor.predict(rows))
        torch.testing.assert_close(found[-1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ("model.model=hstu", "model.times=times"),
        pytest.param(("model.model=hstu",), marks=pytest.mark.slow),
        pytest.param(("model.model=gru4rec",), marks=pytest.mark.slow),
    ],
)
def test_the_other_encoders_train(songs: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    told = tmp_path / "result.json"
    assert main([*options(songs, "run.epochs=10", *words), "--result", str(told)]) == 0
    result = json.loads(told.read_text())
    assert result["model masked"]["hr@5"] > 1.5 * result["popularity masked"]["hr@5"]


def test_two_runs_are_compared_query_by_query(
    songs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for name, steps in (("short", 1), ("long", 60)):
        keep = (f"run.storage_path={tmp_path}", f"run.name={name}", f"run.steps={steps}")
        assert main(options(songs, *keep)) == 0
        runs.append(str(tmp_path / name))
    capsys.readouterr()
    assert main(["report", *runs, "--out", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    short, long = (read_places(run) for run in runs)
    better = gains(long["masked"], 10)[1].mean() - gains(short["masked"], 10)[1].mean()
    assert f"{runs[1]} less {runs[0]}" in said and f"ndcg@10 {better:+.4f} [+0." in said
    # a run of other rows, of which there are as many, is refused
    told = json.loads(Path(runs[0], "places.json").read_text())
    Path(runs[0], "places.json").write_text(json.dumps(told | {"items": [told["items"][0] + 1]}))
    with pytest.raises(InputError, match="differ; rank the same rows"):
        list(comparison(runs))
    Path(runs[0], "places.json").write_text('{"kept": [1], "masked": [1]}')
    with pytest.raises(InputError, match="1 and 101 queries cannot be paired"):
        list(comparison(runs))
    for spoilt in ("{", f'{{"kept": [{10**30}], "masked": [1]}}'):
        Path(runs[0], "places.json").write_text(spoilt)
        with pytest.raises(InputError, match="does not hold the places"):
            list(comparison(runs))


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        first = rng.normal(size=80)
        mean, low, high = paired_bootstrap(first, first + rng.normal(0.2, 1, 80), draws=400)
        assert low < mean < high
        held += low < 0.2 < high
    # of 100 intervals of 95%: 88 is three standard deviations below
    assert held >= 88
    same = paired_bootstrap(first, first)
    assert same == (0.0, 0.0, 0.0)


def test_pairs_are_counted_as_a_loop_counts_them(songs: Path) -> None:
    data = open_data(str(songs / "train"), json.dumps(SCHEMA), with_labels=False)
    pairs = Pairs.of_rows(data, "history", "item")
    follows = np.zeros((ITEMS, ITEMS))
    table = pq.read_table(songs / "train").to_pydict()
    for past, item in zip(table["past"], table["item"], strict=True):
        walk = [*past[-12:], item]
        for before, after in pairwise(walk):
            follows[before, after] += 1
    assert pairs.counts.tolist() == follows.sum(0).tolist()
    history = np.array([3, 9, 1, 1, 30, 17, 5])
    wanted = sum(follows[one] * 0.7**age for age, one in enumerate((5, 17, 30, 1, 1)))
    found = markov_scores(pairs, [history, history[:0]])
    assert found[0] == pytest.approx(wanted + 1e-4 * follows.sum(0))
    assert found[1] == pytest.approx(1e-4 * follows.sum(0))


Read = list[tuple[list[int], list[int], list[list[int]]]]


def read(data: NextItemDataset, ranks: int, epoch: int = 0, start: int = 0) -> Read:
    """Items, keys and candidates of each global batch, rank after rank."""
    loaders = [
        data.loader(rank, ranks, 64, seed=3, epoch=epoch, start_batch=start)
        for rank in range(ranks)
    ]
    return [
        (
            [i for b in batch for i in b.sparse_features["item"].values().tolist()],
            [k for b in batch for k in keys_of(b).tolist()],
            [b.sparse_features["candidates"].values().tolist() for b in batch],
        )
        for batch in zip(*loaders, strict=True)
    ]


@pytest.mark.parametrize("loss", ["sampled", "full"])
def test_batches_hold_the_same_for_any_number_of_ranks(songs: Path, loss: str) -> None:
    rows = open_data(str(songs / "train"), json.dumps(SCHEMA), with_labels=False)
    drawn = SharedNegatives(count=9, num_items=ITEMS, proposal="uniform")
    chosen = drawn if loss == "sampled" else ItemSlices(num_items=ITEMS)
    data = NextItemDataset(data=rows, candidates=chosen)
    assert data.num_rows == 600 and data.num_batches(64) == 10
    assert data.fingerprint() == rows.fingerprint()
    one, later = read(data, 1), read(data, 1, epoch=1)
    # every row of every step of every epoch has a key of its own
    assert len({key for _, keys, _ in [*one, *later] for key in keys}) == 1200
    assert read(data, 1, start=7) == one[7:]
    for ranks in (2, 4):
        for found, wanted in zip(read(data, ranks), one, strict=True):
            assert found[:2] == wanted[:2]
            ids = [i for part in found[2] for i in part]
            assert ids == wanted[2][0] * (ranks if loss == "sampled" else 1)
    draws = {tuple(ids[0]) for _, _, ids in [*one, *later]}
    assert len(draws) == 20 if loss == "sampled" else draws == {tuple(range(ITEMS))}


@pytest.mark.parametrize(
    "change, said",
    [
        ("model.history=past", "the schema has no feature 'past'"),
        ("model.item=song", "feature 'song' is not in the schema"),
        ("model.seen=heard", "seen='heard' is no sequence of the schema, which has"),
        ("model.times=times", "times='times' is for hstu"),
        ("model.model=hstu model.times=seen", "has not one number for each item of 'history'"),
        ("model.model=gru4rec model.heads=4", "heads=4 is for attention, and gru4rec has none"),
        ("model.loss=full", "negatives=16 is for a sampled loss, not 'full'"),
        ("model.loss=in_batch", "negatives=16 is for a sampled loss, not 'in_batch'"),
        ("run.evaluation={every_n_steps=5}", "run.evaluation scores on the way"),
        ("model.ks=[99]", "longer than a list of all 40 items"),
        ("model.ks=[]", "give different lengths of lists"),
        ("model.dropout=1", "dropout=1.0; it must be at least 0 and below 1"),
        ("model.heads=5", "cannot be divided among heads=5"),
        ("model.layers=100000", "layers=100000; it must be between 1 and 1000"),
        ("data.work_dir=x", "work_dir is for 'two_tower'"),
        ("model.length=5", "length=5 is less than the 12 items of 'history'"),
        ("model.history=item", "history and item are both 'item'"),
    ],
)
def test_mistakes_are_said_in_one_line(
    songs: Path, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    assert main(options(songs, *change.split())) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_list_longer_than_the_model_takes_is_named_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    text = json.dumps(SCHEMA).replace('"most_recent": 12', '"most_recent": null')
    (tmp_path / "schema.json").write_text(text)
    for one in ("train", "eval"):
        rows = {"past": [[1, 2]] * 9, "at": [[3, 4]] * 9, "item": [5] * 9}
        if one == part:
            rows["past"][7], rows["at"][7] = [6] * 13, [7] * 13
        (tmp_path / one).mkdir()
        pq.write_table(pa.table(rows), tmp_path / one / "a.parquet", row_group_size=4)
    assert main(options(tmp_path, "model.length=12")) == 2
    err = capsys.readouterr().err
    assert "column 'past' of 'history' has a list of 13 items in row 7 of " in err
    assert f"{part}/a.parquet', and the model takes 12. Raise its length" in err
    data = open_data(str(tmp_path / part), text, with_labels=False)
    for longest in (13, None):
        check_lists(data, "history", longest)
        assert Pairs.of_rows(data, "history", "item", longest).counts[2] == 8


def test_a_history_beyond_the_usual_length_is_refused_before_the_run() -> None:
    text = json.dumps(SCHEMA).replace('"most_recent": 12', '"most_recent": 51')
    schema = FeatureSchema.from_json(text, "the schema")
    with pytest.raises(ConfigError, match="length=50 is less than the 51 items of 'history'"):
        check_schema(NextItemModel(model="hstu", times="times"), schema)
    check_schema(NextItemModel(model="sasrec", length=51), schema)
    check_schema(NextItemModel(model="gru4rec"), schema)
