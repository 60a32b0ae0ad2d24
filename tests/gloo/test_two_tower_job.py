"""The retrieval job on small data with planted tastes: recall beats popularity, ranks agree, and on
MovieLens, too.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from jobs.convert_movielens import convert_movielens
from jobs.train_two_tower import main
from rayrec.command import run_command
from rayrec.data import Feature, FeatureSchema, ParquetDataset
from rayrec.data.hashing import mix, to_ids
from rayrec.errors import ConfigError, InputError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, row_wise
from rayrec.metrics.bootstrap import gains
from rayrec.runs.held_out import Truth
from rayrec.runs.ranked_queries import comparison, read_places
from rayrec.runs.retrieval import TwoTowerModel, TwoTowerRecipe, write_positives
from rayrec.runs.retrieval_scores import RetrievalScorer
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.config import TrainSpec
from rayrec.train.tasks import FitTask
from tests.gloo.trainers import run_task
from tests.ranks import RankPool
from tests.words import sets
from tests.worlds import plan_for

USERS, ITEMS, GROUPS = 60, 40, 4


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users like items of their own group (an item's id modulo GROUPS), and rate others badly;
    every item is as popular as any.
    """
    folder, rng = tmp_path_factory.mktemp("planted"), np.random.default_rng(0)
    pairs = np.array([(u, i) for u in range(USERS) for i in rng.permutation(ITEMS)[:24]])
    users, items = rng.permutation(pairs).T
    label = (users % GROUPS == items % GROUPS).astype(np.int8)
    table = pa.table({"label": label, "user": users, "item": items, "kind": items % 2})
    for name, rows in (("eval", table.slice(0, 200)), ("train", table.slice(200))):
        (folder / name).mkdir()
        pq.write_table(rows, folder / name / "part.parquet")
    sizes = {"user": USERS, "item": ITEMS, "kind": 2}
    tables = tuple(
        EmbeddingBagConfig(n, 8, name=f"t_{k}", feature_names=[k]) for k, n in sizes.items()
    )
    FeatureSchema(
        label="label", features=tuple(Feature(name=k, column=k) for k in sizes), tables=tables
    ).save(folder / "schema.json")
    return folder


def options(folder: Path) -> list[str]:
    return [
        *("--local", "--plan", "table_wise"),
        *sets(
            f"data.train={folder}/train",
            f"data.eval={folder}/eval",
            f"data.schema={folder}/schema.json",
            "model.query=['user']",
            "model.candidate=['item','kind']",
            "model.layers=[16,8]",
            "model.ks=[5]",
        ),
    ]


def test_recall_beats_popularity(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    assert (
        main(
            [
                *options(planted),
                *sets("run.epochs=60", "run.global_batch_size=64"),
                *sets(f"run.storage_path={tmp_path}", "run.name=towers"),
                "--result",
                str(result),
            ]
        )
        == 0
    )
    told = json.loads(result.read_text())
    assert told["model"]["recall@5"] > 0.8 > 0.4 > told["popularity"]["recall@5"]
    assert told["queries"] > 20 and told["candidates"] == ITEMS
    said = capsys.readouterr().out
    assert "two towers: recall@5" in said and "popularity: recall@5" in said
    assert "warning" not in said
    # what the run keeps of each user's wanted items has the same scores
    places = read_places(str(tmp_path / "towers"))
    assert places is not None and len(places["wanted"]) >= told["queries"]
    for who, name in (("model", "masked"), ("popularity", "popularity masked")):
        recall, ndcg = gains(places[name], 5, places["wanted"])
        assert recall.mean() == pytest.approx(told[who]["recall@5"])
        assert ndcg.mean() == pytest.approx(told[who]["ndcg@5"])
    both = (gains(places[name], 10, places["wanted"]) for name in ("popularity masked", "masked"))
    (low, _), (high, _) = both
    first, line = comparison([str(tmp_path / "towers")])
    assert "towers less popularity" in first
    assert f"seen masked: recall@10 {(high - low).mean():+.4f} [+" in line
    assert places["items"].shape == (1,)
    (tmp_path / "other").mkdir()
    for wanted, says in (([1, 1], "2 wanted items"), ([*places["wanted"][::-1]], "differ")):
        other = {"masked": places["masked"].tolist(), "wanted": np.array(wanted).tolist()}
        (tmp_path / "other" / "places.json").write_text(json.dumps(other))
        with pytest.raises(InputError, match=says):
            list(comparison([str(tmp_path / "towers"), str(tmp_path / "other")]))


def test_runs_are_compared_with_the_first_of_their_kind(tmp_path: Path) -> None:
    towers = {"masked": [0, 3, 1], "wanted": [2, 1]}
    next_item = {"kept": [0, 1], "masked": [0, 1]}
    for name, places in (("a", towers), ("b", next_item), ("c", towers), ("d", next_item)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "places.json").write_text(json.dumps(places))
    lines = list(comparison([str(tmp_path / name) for name in "abcd"]))
    said = [line.replace(f"{tmp_path}/", "").split(",")[0] for line in lines if " less " in line]
    assert said == ["d less b", "c less a"]
    for damage in ({"popularity masked": [0]}, {"wanted": [4, -1]}):
        (tmp_path / "a" / "places.json").write_text(json.dumps(towers | damage))
        with pytest.raises(InputError, match="3 wanted items"):
            list(comparison([str(tmp_path / "a")]))


def test_a_model_below_popularity_is_said_in_one_line(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    untrained = ("run.sparse_optimizer.lr=0", "run.dense_optimizer.lr=0")
    words = sets(*untrained, "run.steps=1", "run.global_batch_size=64", "run.seed=1")
    assert main([*options(planted), *words, "--result", str(result)]) == 0
    told = json.loads(result.read_text())
    assert told["model"]["recall@5"] < told["popularity"]["recall@5"]
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert (
        said.startswith("warning: the model is below popularity (recall@5 0.") and "log_q" in said
    )


def towers(all_ranks: bool = False) -> TwoTowerModel:
    return TwoTowerModel(
        query=("user",), candidate=("item", "kind"), layers=(8,), all_ranks=all_ranks
    )


def task_for(
    folder: Path, work: Path, world_size: int, steps: int, all_ranks: bool = False
) -> FitTask:
    schema = (folder / "schema.json").read_text()
    train, positives = str(folder / "train"), str(work)
    shares = write_positives(train, schema, "item", positives)
    recipe = TwoTowerRecipe(schema=schema, model=towers(all_ranks), log_q=shares)
    tables = FeatureSchema.from_json(schema).tables
    plan = plan_for(
        world_size, {t.name: row_wise(t, range(min(world_size, t.num_embeddings))) for t in tables}
    )
    spec = TrainSpec(
        model=recipe,
        data=ParquetDataset(positives, FeatureSchema.from_json(schema)),
        plan=plan,
        global_batch_size=64,
        steps=steps,
        drop_last=True,
        checkpoint=CheckpointConfig(at_end=False),
    )
    scorer = RetrievalScorer(
        train=train,
        held_out=str(folder / "eval"),
        schema=schema,
        user="user",
        item="item",
        ks=(3, 10),
    )
    return FitTask(spec=spec, scorer=scorer)


def test_lists_do_not_depend_on_the_number_of_ranks(
    ranks: RankPool, planted: Path, tmp_path: Path
) -> None:
    """Untrained, since in-batch negatives do; every rank embeds a share of items and users, and all
    know the whole.
    """
    found = {w: ranks.run(w, run_task, task_for(planted, tmp_path / str(w), w, 0)) for w in (1, 3)}
    assert found[3][0] == found[3][1] == found[3][2]
    assert found[3][0].metrics == pytest.approx(found[1][0].metrics, abs=1e-6)


def test_ranks_that_share_their_negatives_learn_as_one(
    ranks: RankPool, planted: Path, tmp_path: Path
) -> None:
    found = {
        w: ranks.run(w, run_task, task_for(planted, tmp_path / str(w), w, 60, True)) for w in (1, 3)
    }
    # a place may change where two scores are equal up to their rounding
    assert found[3][0].metrics == pytest.approx(found[1][0].metrics, abs=0.01)


@pytest.mark.slow
def test_two_ranks_learn_as_well(ranks: RankPool, planted: Path, tmp_path: Path) -> None:
    one, other = ranks.run(2, run_task, task_for(planted, tmp_path, 2, 200))
    assert one == other
    assert one.metrics["model recall@3"] > 2 * one.metrics["popularity recall@3"]


def test_truth_leaves_out_what_a_user_has(planted: Path) -> None:
    schema = FeatureSchema.load(planted / "schema.json")
    truth = Truth.load(str(planted / "train"), str(planted / "eval"), schema, "user", "item")
    train, held_out = (pq.read_table(planted / name).to_pylist() for name in ("train", "eval"))
    wanted: dict[int, set[int]] = {}
    for row in held_out:
        if row["label"]:
            wanted.setdefault(row["user"], set()).add(row["item"])
    seen = {user: {row["item"] for row in train if row["user"] == user} for user in wanted}
    users = truth.users["user"].to_pylist()
    assert users == sorted(wanted)
    assert [set(x.tolist()) for x in truth.relevant] == [wanted[u] - seen[u] for u in users]
    assert [set(x.tolist()) for x in truth.seen] == [seen[u] for u in users]
    assert truth.items["item"].to_pylist() == truth.item_ids.tolist() == list(range(ITEMS))
    assert truth.counts.tolist() == [
        sum(r["label"] for r in train if r["item"] == i) for i in range(ITEMS)
    ]


def raw(planted: Path, folder: Path) -> Path:
    """The same rows, with users as texts and items as numbers of 64 bits, for dynamic tables."""
    schema = FeatureSchema.load(planted / "schema.json")
    for name in ("train", "eval"):
        rows = pq.read_table(planted / name)
        users = pa.array([f"user {one}" for one in rows["user"].to_pylist()])
        items = pa.array(raw_item(rows["item"].to_numpy()))
        rows = rows.set_column(1, "user", users.dictionary_encode()).set_column(2, "item", items)
        (folder / name).mkdir(parents=True)
        pq.write_table(rows, folder / name / "part.parquet")
    rule = DynamicConfig(blocks=2)
    tables = tuple(
        t if t.name == "t_kind" else replace(t, num_embeddings=128, dynamic=rule)
        for t in schema.tables
    )
    replace(schema, tables=tables).save(folder / "schema.json")
    return folder


def raw_item(items: NDArray[np.int64]) -> NDArray[np.int64]:
    return to_ids(mix(items.view(np.uint64)))


def test_raw_ids_have_the_truth_of_numbered_ones(planted: Path, tmp_path: Path) -> None:
    folder, found = raw(planted, tmp_path / "raw"), []
    for one in (planted, folder):
        schema = FeatureSchema.load(one / "schema.json")
        found.append(Truth.load(str(one / "train"), str(one / "eval"), schema, "user", "item"))
    numbered, named = found
    where = {f"user {one}": i for i, one in enumerate(numbered.users["user"].to_pylist())}
    assert {*named.users["user"].to_pylist()} == where.keys()
    for row, user in enumerate(named.users["user"].to_pylist()):
        for lists, wanted in ((named.relevant, numbered.relevant), (named.seen, numbered.seen)):
            expected = raw_item(wanted[where[user]]).tolist()
            assert sorted(lists[row].tolist()) == sorted(expected)
    counts = dict(zip(named.item_ids.tolist(), named.counts.tolist(), strict=True))
    own = raw_item(numbered.item_ids).tolist()
    assert counts == dict(zip(own, numbered.counts.tolist(), strict=True))


@pytest.mark.slow
def test_towers_learn_from_raw_ids(ranks: RankPool, planted: Path, tmp_path: Path) -> None:
    folder = raw(planted, tmp_path / "raw")
    one, other = ranks.run(2, run_task, task_for(folder, tmp_path / "work", 2, 200))
    assert one == other
    assert one.metrics["candidates"] == ITEMS
    assert one.metrics["model recall@3"] > 2 * one.metrics["popularity recall@3"]
    numbered = ranks.run(1, run_task, task_for(planted, tmp_path / "numbered", 1, 0))[0]
    for name in ("queries", "candidates"):
        assert one.metrics[name] == numbered.metrics[name]
    # popular items are as popular; lists of equal counts are in the order of their ids
    assert one.metrics["popularity mrr"] == pytest.approx(
        numbered.metrics["popularity mrr"], abs=0.1
    )


def test_mistakes_are_said_in_one_line(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, ["--local"]) == 2
    assert "train_two_tower.toml: [data] needs train" in capsys.readouterr().err
    assert run_command(main, [*options(planted), *sets("model.query=['user','age']")]) == 2
    assert "no feature 'age'" in capsys.readouterr().err
    schema = (planted / "schema.json").read_text()
    with pytest.raises(ConfigError, match="'year' is not in the schema"):
        write_positives(str(planted / "train"), schema, "year", str(tmp_path))
    none = pq.read_table(planted / "train").filter(
        pa.compute.equal(pq.read_table(planted / "train")["label"], 0)
    )
    pq.write_table(none, tmp_path / "none.parquet")
    with pytest.raises(InputError, match="none with label=1"):
        write_positives(str(tmp_path / "none.parquet"), schema, "item", str(tmp_path / "out"))


def test_held_out_rows_without_positives_are_refused_before_training(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pq.read_table(planted / "eval")
    pq.write_table(rows.filter(pa.compute.equal(rows["label"], 0)), tmp_path / "eval.parquet")
    assert run_command(main, [*options(planted), *sets(f"data.eval={tmp_path}/eval.parquet")]) == 2
    said = capsys.readouterr()
    assert "recall has no meaning" in said.err and "step" not in said.out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (sets("data.work_dir=FILE"), "work_dir"),
        (sets("data.where=user>3"), "where and eval_where are for click models"),
        (sets("data.num_streams=1"), "num_streams is for click models"),
        (sets("model.query=['user','user']"), "query has 'user' twice"),
        (sets("model.query=['nothing']"), "no feature 'nothing'"),
        (sets("model.candidate=['nothing']"), "no feature 'nothing'"),
        (sets("model.ks=[5,5]"), "ks has 5 twice"),
        (sets("model.ks=[41]"), "ks has 41, which is longer than a list of all 40 candidates"),
        (sets("run.global_batch_size=1"), "global_batch_size=1 on 1 ranks"),
    ],
)
def test_mistaken_options_are_said_in_one_line(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    (tmp_path / "file").touch()
    words = [word.replace("FILE", str(tmp_path / "file")) for word in more]
    try:
        code = run_command(main, [*options(planted), *words])
    except SystemExit as ended:  # while the command line is read
        code = int(ended.code or 0)
    said = capsys.readouterr()
    assert code == 2 and says in said.err and said.err.count("\n") == 1
    assert "step" not in said.out


@pytest.mark.parametrize(("value", "kind"), [(2, "int8"), (None, "int8"), (math.nan, "float32")])
@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_label_that_is_none_is_refused_before_training(
    planted: Path, tmp_path: Path, part: str, value: float | None, kind: str
) -> None:
    rows = pq.read_table(planted / part)
    labels = rows["label"].to_pylist()
    labels[7] = value
    spoilt = rows.set_column(0, "label", pa.array(labels, pa.type_for_alias(kind)))
    pq.write_table(spoilt, tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"'label' holds (2|null|nan) in row 7 of .*rows\.parquet"):
        main([*options(planted), *sets(f"data.{part}={tmp_path}/rows.parquet")])


def test_a_missing_column_is_named(planted: Path, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(planted / "train").drop_columns(["kind"]), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"column 'kind' is missing \(.*t\.parquet\)"):
        main([*options(planted), *sets(f"data.train={tmp_path}/t.parquet")])


def test_weights_of_a_schema_reach_both_towers(planted: Path) -> None:
    raw = json.loads((planted / "schema.json").read_text())
    for weights in (None, "w"):
        raw["features"][2]["weights"] = weights
        model = TwoTowerRecipe(schema=json.dumps(raw), model=towers())().two_tower
        assert model.ebc.is_weighted() is model.candidate_ebc.is_weighted() is bool(weights)


def test_a_run_saves_and_goes_on(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two halves end as the whole does, and the job says where it saved."""
    small = [*options(planted), *sets("run.global_batch_size=64"), "--checkpoint-dir"]
    assert (
        main(
            [
                *small,
                str(tmp_path / "whole"),
                *sets("run.epochs=4"),
                "--result",
                str(tmp_path / "whole.json"),
            ]
        )
        == 0
    )
    assert main([*small, str(tmp_path / "half"), *sets("run.epochs=2")]) == 0
    resumed = [
        *small,
        str(tmp_path / "half"),
        *sets("run.epochs=4", "run.resume_from=latest"),
        "--result",
        str(tmp_path / "half.json"),
    ]
    assert main(resumed) == 0
    assert "resumed from" in capsys.readouterr().out
    whole, half = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "half")
    )
    assert whole["model"] == half["model"] and whole["steps"] == half["steps"]
    assert half["checkpoint"] == f"{tmp_path}/half/step-{half['steps']:08d}"


@pytest.mark.slow
def test_recall_on_movielens_is_twice_that_of_popularity(real_data: Path, tmp_path: Path) -> None:
    result, films = tmp_path / "result.json", tmp_path / "films"
    convert_movielens(real_data / "ml-100k", films, dim=32)
    words = ["--data", str(films), "--local", "--plan", "table_wise", *sets("run.epochs=4")]
    assert main([*words, "--result", str(result)]) == 0
    told = json.loads(result.read_text())
    assert told["candidates"] == 1682
    assert told["model"]["recall@10"] > 0.24 > 1.5 * told["popularity"]["recall@10"]
