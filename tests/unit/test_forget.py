"""`rayrec forget` on a trained run: nothing of a key is left in any file, all else is as it was.

A trained run is searched for bytes, byte by byte, before and after.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.checkpoint import CheckpointManager, load_table
from rayrec.cli.main import main
from rayrec.data import Feature, FeatureSchema, to_batch
from rayrec.erasure.forget import forget
from rayrec.layout import EmbeddingBagConfig
from rayrec.serve import Predictor, export, open_artifact
from rayrec.serve.chain.version_policy import Verdict
from rayrec.train import RankTrainer
from tests import forgotten_run
from tests.forgotten_run import STEPS, spec, train
from tests.unit.published_worlds import bytes_of

NAMES = ("t_user", "t_item", "t_word")
WORD, ITEMS = "word 7", [3, 4]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, which no test changes."""
    return forgotten_run.make_run(tmp_path_factory.mktemp("forgotten"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, with its data beside it."""
    shutil.copytree(made, tmp_path / "run")
    shutil.copytree(made.parent / "data", tmp_path / "data")
    return tmp_path / "run"


class Victims:
    """Keys to forget: users with a row, users that lost theirs, users that wait for one, items, and
    a word.

    Attributes:
        rows: the ids of the tables, by name; row numbers where they are not dynamic.
        path: the key file.
    """

    def __init__(self, run: Path) -> None:
        early, newest = (load_table(str(run / f"step-{s:08d}"), "t_user") for s in (4, STEPS))
        known, once = (set(one["id_key"].to_pylist()) - {-1} for one in (newest, early))
        waiting = set(newest["candidate_key"].to_pylist()) - {-1, *known, *once}
        self.users = [*sorted(known)[:3], *sorted(once - known)[:2], *sorted(waiting)[:2]]
        word = Feature(name="word", column="word", hash_buckets=50)
        table = EmbeddingBagConfig(50, 8, name="t", feature_names=["word"])
        schema = FeatureSchema(label="label", features=(word,), tables=(table,))
        batch = to_batch(pa.table({"word": [WORD]}), schema, with_labels=False)
        bucket = batch.sparse_features["word"].values().tolist()
        self.rows = {"t_user": self.users, "t_item": ITEMS, "t_word": bucket}
        self.path = run.parent / "keys.parquet"
        columns = {"user_id": self.users, "item": ITEMS, "word": [WORD]}
        longest = max(map(len, columns.values()))
        filled = {name: keys + [None] * (longest - len(keys)) for name, keys in columns.items()}
        pq.write_table(pa.table(filled), self.path)

    def are_in(self, table: pa.Table, name: str) -> np.ndarray:
        """Which rows of a table of a checkpoint are theirs."""
        key = table["id_key" if name == "t_user" else "row"].to_numpy()
        return np.isin(key, self.rows[name])


def tables_of(run: Path) -> dict[tuple[int, str], pa.Table]:
    manager = CheckpointManager(str(run))
    return {
        (step, name): load_table(manager.path(step), name)
        for step in manager.steps()
        for name in NAMES
    }


def needles(run: Path, victims: Victims, fresh: dict[str, np.ndarray]) -> Iterator[bytes]:
    """The bytes of the keys, and of their rows and state as every file has them."""
    for user in victims.users:
        yield np.int64(user).tobytes()
        yield str(user).encode()
    yield WORD.encode()
    for (_, name), table in tables_of(run).items():
        mine = victims.are_in(table, name)
        for column in ("weight", "momentum1"):
            values = table[column].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
            for row, value in zip(table["row"].to_numpy()[mine], values[mine], strict=True):
                is_first = name in fresh and np.array_equal(value, fresh[name][row])
                if value.any() and not is_first:
                    yield value.tobytes()
    packed = open_artifact(run / "served" / "int8").packed
    for number, table in enumerate(packed.tables):
        rows = torch.tensor(victims.rows[table.name])
        if (ids := packed.ids_of(number)) is not None:
            rows = ids.find(rows)
            rows = rows[rows < table.rows]
        yield from (packed.rows_of(number)[row].numpy().tobytes() for row in rows.tolist())


def first_rows(data: Path, run: Path) -> dict[str, np.ndarray]:
    """The static tables of a model that has not trained."""
    with RankTrainer(replace(spec(data, run), run_path=None, publish=None)) as trainer:
        trainer.begin()
        states = {s.shard.table: s.weight.numpy().copy() for s in trainer.model.shard_states()}
    return {name: states[name] for name in NAMES if name != "t_user"}


def contents(run: Path) -> dict[str, bytes]:
    files = (file for file in run.rglob("*") if file.is_file())
    return {file.relative_to(run).as_posix(): file.read_bytes() for file in files}


def test_no_byte_of_a_key_or_of_its_rows_is_left_in_any_file(run: Path) -> None:
    victims, fresh = Victims(run), first_rows(run.parent / "data", run)
    wanted = set(needles(run, victims, fresh))
    before = b"\0".join(contents(run).values())
    told = {str(user).encode() for user in victims.users} | {WORD.encode()}
    assert len(wanted) > 60 and all(one in before for one in wanted - told)
    receipt, path = forget(run, victims.path)
    after = contents(run)
    for one in wanted:
        assert [name for name, held in after.items() if one in held] == []
    assert not (run / ".erasure").exists() and not (run / "lock.json").exists()
    found = {table.name: (table.ids, table.found, table.found_now) for table in receipt.tables}
    assert found == {"t_user": (7, 7, 0), "t_item": (2, 2, 0), "t_word": (1, 1, 0)}
    assert {t.name: t.shared for t in receipt.tables} == {"t_user": 0, "t_item": 0, "t_word": 1}
    assert json.loads(Path(path).read_text())["tables"][0]["found"] == 7


def test_other_rows_stay_and_rows_of_keys_begin_anew(run: Path) -> None:
    victims, before = Victims(run), tables_of(run)
    fresh = first_rows(run.parent / "data", run)
    forget(run, victims.path)
    after = tables_of(run)
    assert before.keys() == after.keys() and len(after) == 3 * STEPS // 2
    for (step, name), table in after.items():
        was, mine = before[step, name], victims.are_in(before[step, name], name)
        assert mine.any() or (name == "t_user" and step not in (4, STEPS))
        for column in was.schema.names:
            old, new = (one[column].combine_chunks() for one in (was, table))
            if column.startswith("candidate_"):
                kept = ~np.isin(was["candidate_key"].to_numpy(), victims.users)
                assert kept.all() or name == "t_user"
                assert new.filter(pa.array(kept)).equals(old.filter(pa.array(kept)))
                assert not np.isin(table["candidate_key"].to_numpy(), victims.users).any()
                continue
            assert new.filter(pa.array(~mine)).equals(old.filter(pa.array(~mine)))
            gone = new.filter(pa.array(mine))
            if column == "id_key":
                assert set(gone.to_pylist()) <= {-1}
            elif column == "weight" and name in fresh:
                values = gone.flatten().to_numpy().reshape(-1, fresh[name].shape[1])
                assert np.array_equal(values, fresh[name][was["row"].to_numpy()[mine]])
            elif column == "momentum1":
                assert not gone.flatten().to_numpy().any()


def test_a_run_goes_on_and_servers_follow_it(run: Path) -> None:
    victims = Victims(run)
    following = Predictor.follow(run)
    late = run.parent / "late"
    for name in ("base-00000001", "delta-00000002"):
        shutil.copytree(run / "published" / name, late / name)
    behind = Predictor.follow(late)
    forget(run, victims.path)
    assert following.refresh() == 1 and following.verdict is Verdict.CURRENT
    # one that was behind finds the new base alone
    shutil.rmtree(late)
    shutil.copytree(run / "published", late)
    assert behind.refresh() == 1 and behind.verdict is Verdict.CURRENT
    newest = run / f"step-{STEPS:08d}"
    export(newest, run.parent / "fresh", types="fp32")
    exported = Predictor.load(run.parent / "fresh")
    every = [following, behind, Predictor.follow(run), Predictor.load(run / "served" / "fp32")]
    for predictor in every:
        # rows of items and words are zeros on servers, and first values in training
        assert bytes_of(predictor)["t_user"] == bytes_of(exported)["t_user"]
        rows = [{"d": 0.5, "user_id": u, "item": 9, "word": "word 1"} for u in victims.users]
        stranger = predictor.predict([rows[0] | {"user_id": 123_456_789}])
        assert predictor.predict(rows).tolist() == stranger.tolist() * len(rows)
    known = [{"d": 0.5, "user_id": u, "item": 9, "word": "word 1"} for u in known_users(run)]
    scores = [predictor.predict(known) for predictor in every]
    assert all(torch.equal(score, scores[0]) for score in scores)
    more = replace(spec(run.parent / "data", run), steps=STEPS + 2, resume_from=(str(newest),))
    train(more)
    assert following.refresh() == 1 and following.step == STEPS + 2


def known_users(run: Path) -> list[int]:
    keys = load_table(str(run / f"step-{STEPS:08d}"), "t_user")["id_key"].to_pylist()
    return [key for key in keys if key != -1]


def test_a_second_time_changes_nothing(run: Path) -> None:
    victims = Victims(run)
    forget(run, victims.path)
    before = contents(run)
    receipt, path = forget(run, victims.path)
    assert [table.found for table in receipt.tables] == [0, 0, 0] and receipt.files == ()
    after = contents(run)
    del after[Path(path).name]
    assert after == before


def test_the_receipt_tells_every_file_that_changed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victims, before = Victims(run), sums(run)
    (run / "notes.txt").write_text("of somebody's own")
    assert main(["forget", "--keys", str(victims.path), str(run)]) == 0
    told = capsys.readouterr().out
    (receipt,) = run.glob("forgotten-*.json")
    assert f"receipt: {receipt}\n" in told and "not read: notes.txt\n" in told
    assert "t_user: 7 of 7 ids found, 0 now\n" in told
    said, after = json.loads(receipt.read_text()), sums(run)
    del after[receipt.name], after["notes.txt"]
    files = {one["path"]: (one.get("before"), one.get("after")) for one in said["files"]}
    changed = before.items() ^ after.items()
    assert files == {path: (before.get(path), after.get(path)) for path, _ in changed}
    by_path = {one["path"]: one["rows"] for one in said["files"]}
    assert by_path["published/delta-00000006/tables/0001-t_item-0.arrow"] == len(ITEMS)
    assert by_path["published/delta-00000006/publication.json"] == 0
    # whoever knows a key can tell whether it was among them
    assert salted(said["salt"], WORD) in said["keys"]["word"]
    assert {salted(said["salt"], user) for user in victims.users} == set(said["keys"]["user_id"])


def sums(run: Path) -> dict[str, str]:
    return {path: sha256(content) for path, content in contents(run).items()}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def salted(salt: str, key: object) -> str:
    return sha256(f"{salt}{key}".encode())


def test_publications_outside_of_the_run_are_forgotten_in_their_own_folder(run: Path) -> None:
    victims, outside = Victims(run), run.parent / "outside"
    shutil.move(run / "published", outside)
    before = {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
    forget(run, victims.path)
    assert {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()} == before
    following = Predictor.follow(outside)
    receipt, _ = forget(outside, victims.path)
    assert {table.name: table.found_now for table in receipt.tables}["t_user"] == 0
    assert any(table.found for table in receipt.tables) and following.refresh() == 1
