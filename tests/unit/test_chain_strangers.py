"""A chain that somebody else writes to: whatever lies there, a follower goes on at its version."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from rayrec.errors import ArtifactError
from rayrec.quant import PackedTables
from rayrec.serve import Predictor
from rayrec.serve.artifact import open_artifact
from rayrec.serve.chain import copies
from rayrec.serve.chain.version_policy import Verdict
from rayrec.serve.dense_file import dense_bytes, loaded_dense
from tests.unit.bad_texts import distorted, sealed
from tests.unit.published_worlds import bytes_of, published_world
from tests.unit.serve_worlds import WIDTH, rows

ASKED = rows(8, 5).drop_columns(["click"])
DELTA = "delta-00000002"
ROWS = 50  # of the table that is changed below
ROW = pa.binary(WIDTH + 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A base and a delta that changes all tables."""
    folder, rng = tmp_path_factory.mktemp("chain") / "own", random.Random(1)
    world = published_world(folder, 3, ranks=1)
    world.types = dict.fromkeys(world.types, "int8")
    world.start_ranks(world.plan)
    world.publish()
    for _ in range(4):
        world.train(rng)
    for touched in world.touched.values():
        touched.update((1, 2, 3))
    assert world.publish() == DELTA
    return folder


class Stranger:
    """A follower of a copy of the chain, and who changes its delta."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self._delta, self.folder = whole / DELTA, folder
        shutil.copytree(whole / "base-00000001", folder / "base-00000001")
        self.follow()

    def follow(self) -> None:
        shutil.rmtree(self.folder / DELTA, ignore_errors=True)
        self.predictor = Predictor.follow(self.folder, trusted=False)

    def looks(self, change: Callable[[Path], None]) -> int:
        """Whether a follower takes the delta; what it serves is that of a version in any case."""
        shutil.rmtree(self.folder / DELTA, ignore_errors=True)
        shutil.copytree(self._delta, self.folder / DELTA)
        change(self.folder / DELTA)
        one = self.predictor
        step, scores = one.step, one.predict(ASKED)
        applied = one.refresh()
        if applied:
            one.predict(ASKED)
            self.follow()
        else:
            assert one.verdict is not Verdict.CURRENT and "\n" not in one.trouble
            assert "contradicts itself" not in one.trouble or "MemoryError" in one.trouble
            assert one.step == step and torch.equal(one.predict(ASKED), scores)
        return applied


@pytest.fixture
def stranger(whole, tmp_path) -> Stranger:
    return Stranger(whole, tmp_path / "copy")


@pytest.mark.seeds(range(30))
def test_a_publication_with_any_two_values_changed_changes_nothing(seed, stranger):
    rng = random.Random(seed)

    def change(delta: Path) -> None:
        file = delta / "publication.json"
        file.write_text(sealed(distorted(file.read_text(), rng)))

    for _ in range(12):
        stranger.looks(change)


def stored(delta: Path, path: Path, content: bytes, entry: dict) -> None:
    path.write_bytes(content)
    entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def with_rows(content: bytes) -> Callable[[Path], None]:
    def change(delta: Path) -> None:
        body = json.loads((delta / "publication.json").read_text())
        (table,) = (one for one in body["tables"] if one["name"] == "user")
        table["rows"], (file, *_) = 2, table["files"]
        table["files"] = [file]
        stored(delta, delta / file["path"], content, file)
        (delta / "publication.json").write_text(sealed(body))

    return change


def with_dense(change_of: Callable[[dict], dict]) -> Callable[[Path], None]:
    def change(delta: Path) -> None:
        body = json.loads((delta / "publication.json").read_text())
        file = body["dense"]
        dense = loaded_dense((delta / file["path"]).read_bytes(), "here")
        stored(delta, delta / file["path"], dense_bytes(change_of(dense)), file)
        (delta / "publication.json").write_text(sealed(body))

    return change


def arrow(**columns: pa.Array) -> bytes:
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue().to_pybytes()


TWO = pa.array([bytes(WIDTH + 4)] * 2, ROW)
NUMBERS = {
    "floats": pa.array([0.0, 1.0]),
    "bools": pa.array([False, True]),
    "without signs": pa.array([0, 1], pa.uint64()),
    "lists": pa.array([[0], [1]]),
    "times": pa.array([0, 1], pa.timestamp("us")),
    "nulls": pa.nulls(2),
    "one null": pa.array([0, None]),
    "beyond the table": pa.array([0, ROWS]),
    "negative": pa.array([-1, 0]),
    # their difference does not fit 64 bits, and has the sign of an ascending pair
    "far apart": pa.array([2**63 - 1, -(2**63)]),
    "twice the same": pa.array([1, 1]),
}


def test_rows_that_the_table_does_not_have_change_nothing(stranger):
    assert stranger.looks(with_rows(arrow(row=pa.array([0, 1]), packed=TWO))) == 1
    for numbers in NUMBERS.values():
        assert stranger.looks(with_rows(arrow(row=numbers, packed=TWO))) == 0
    for packed in (TWO.dictionary_encode(), pa.nulls(2, ROW), pa.nulls(2), TWO.cast(pa.binary())):
        assert stranger.looks(with_rows(arrow(row=pa.array([0, 1]), packed=packed))) == 0
    for content in (b"", b"x" * 99, arrow(packed=TWO), arrow(row=pa.array([0, 1]))):
        assert stranger.looks(with_rows(content)) == 0


def test_a_dense_part_of_another_model_changes_nothing(stranger):
    for change in (
        lambda dense: {name: one for name, one in dense.items() if name != min(dense)},
        lambda dense: {**dense, "another": torch.zeros(3)},
        lambda dense: {**dense, min(dense): torch.zeros(1)},
        lambda dense: {**dense, min(dense): dense[min(dense)].double()},
        lambda dense: {},
    ):
        assert stranger.looks(with_dense(change)) == 0
        assert "has other parameters than the base" in stranger.predictor.trouble
    assert stranger.looks(with_dense(lambda dense: dense)) == 1


def test_a_write_that_fails_half_way_is_never_served(stranger, monkeypatch, whole):
    """The copy that was half written is written anew, from the one that is served."""
    write, count = copies._write, [0]

    def fails(*given) -> None:
        count[0] += 1
        if count[0] == 2:
            raise MemoryError("no room")
        write(*given)

    monkeypatch.setattr(copies, "_write", fails)
    assert stranger.looks(lambda delta: None) == 0
    assert "contradicts itself (MemoryError: no room)" in stranger.predictor.trouble
    # a delta that changes nothing of what the one before has written
    none = with_rows(arrow(row=pa.array([7, 8]), packed=TWO))
    one = stranger.predictor
    shutil.rmtree(stranger.folder / DELTA)
    shutil.copytree(whole / DELTA, stranger.folder / DELTA)
    none(stranger.folder / DELTA)
    assert one.refresh() == 1
    assert bytes_of(one) == bytes_of(Predictor.follow(stranger.folder))


def test_a_base_that_is_half_taken_leaves_nothing_of_its_rows(whole):
    packed = open_artifact(whole / "base-00000001").packed
    two = copies.TableCopies(packed, 2)
    two.apply([])
    served = two.data[two.active].clone()
    with pytest.raises(RuntimeError):
        two.load(PackedTables(packed.tables, ~packed.data[: len(packed.data) // 2]))
    two.apply([])
    assert torch.equal(two.data[two.active], served)


@pytest.mark.parametrize("name", ["publication.json", "dense.safetensors", "rows"])
def test_a_pipe_in_the_place_of_a_file_holds_nobody(stranger, name):
    def change(delta: Path) -> None:
        path = next((delta / "tables").iterdir()) if name == "rows" else delta / name
        path.unlink()
        os.mkfifo(path)

    assert stranger.looks(change) == 0
    assert "it is no plain file" in stranger.predictor.trouble


def test_a_pipe_or_a_file_without_end_is_no_manifest(whole, tmp_path):
    copied = shutil.copytree(whole / "base-00000001", tmp_path / "base")
    path = copied / "manifest.json"
    for make, says in (
        (lambda: os.mkfifo(path), "it is no plain file"),
        (lambda: path.symlink_to("/dev/zero"), "it is no plain file"),
        (lambda: path.mkdir(), "it is no plain file"),
        (lambda: path.touch() or os.truncate(path, 1 << 40), "it has more than"),
    ):
        path.unlink(missing_ok=True)
        make()
        with pytest.raises(ArtifactError, match=says):
            Predictor.load(copied)
        if path.is_dir():
            path.rmdir()
