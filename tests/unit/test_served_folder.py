"""What happens to the folder of an artifact while it is served, and while it is read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from threading import Thread

import pytest
import torch

from rayrec.errors import ArtifactError
from rayrec.serve import Predictor, open_artifact, stored
from rayrec.serve.sealed_memory import TableMemory, read_ahead
from tests.unit.published_worlds import published_world
from tests.unit.serve_worlds import an_artifact, rows
from tests.unit.served_processes import Load, replicated, wait_for

ASKED = rows(20, 3).drop_columns(["click"])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return an_artifact(tmp_path_factory.mktemp("served"))


@pytest.fixture
def copied(artifact, tmp_path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write_over(path: Path) -> None:
    """As a copying program does, in place."""
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def test_whoever_writes_to_the_folder_of_a_predictor_changes_no_score(copied):
    predictor = Predictor.load(copied)
    wanted = predictor.predict(ASKED)
    for path in files_of(copied):
        write_over(path)
    assert torch.equal(predictor.predict(ASKED), wanted)
    for path in files_of(copied):
        os.truncate(path, 0)
    assert torch.equal(predictor.predict(ASKED), wanted)


def test_whoever_writes_to_a_base_changes_no_score_of_its_follower(tmp_path):
    world = published_world(tmp_path / "chain", 0)
    world.publish()
    predictor = Predictor.follow(world.folder)
    wanted = predictor.predict(ASKED)
    for path in files_of(world.folder):
        write_over(path)
        os.truncate(path, 0)
    assert predictor.refresh() == 0
    assert torch.equal(predictor.predict(ASKED), wanted)


def test_the_rows_of_an_artifact_cannot_be_written_and_are_sent_without_a_copy(artifact):
    opened = open_artifact(artifact)
    again = pickle.loads(pickle.dumps(opened))
    inodes = {os.fstat(one.memory._file).st_ino for one in (opened, again)}
    assert len(inodes) == 1 and torch.equal(opened.packed.data, again.packed.data)
    for one in (opened, again):
        with pytest.raises(OSError):
            one.memory.write(memoryview(b"x"), 0)
        with pytest.raises(OSError):
            os.truncate(f"/proc/self/fd/{one.memory._file}", 0)


def test_what_changes_while_it_is_read_is_found(artifact, copied, monkeypatch):
    """The bytes that are checked are those that are kept."""
    name = json.loads((copied / "manifest.json").read_text())["tables"][0]["file"]["path"]
    path, write = copied / name, TableMemory.write
    wanted = Predictor.load(copied).predict(ASKED)
    monkeypatch.setattr(stored, "_PIECE", 64)

    def write_to_file_at(place: int) -> None:
        def put(memory: TableMemory, piece: memoryview, start: int) -> None:
            write(memory, piece, start)
            if start == 0:  # the first rows of the first table
                with path.open("r+b") as file:
                    file.seek(place)
                    file.write(b"other")

        monkeypatch.setattr(TableMemory, "write", put)

    write_to_file_at(0)  # which was read before
    assert torch.equal(Predictor.load(copied).predict(ASKED), wanted)
    shutil.copy(artifact / name, path)
    write_to_file_at(path.stat().st_size - 5)
    with pytest.raises(ArtifactError, match=f"{path.name} is damaged"):
        Predictor.load(copied)


def test_nobody_waits_for_a_pipe_that_took_the_place_of_a_file(tmp_path):
    """It was a plain file when its size was looked at."""
    os.mkfifo(tmp_path / "rows")
    reading = Thread(target=read_ahead, args=([tmp_path / "rows"],), daemon=True)
    reading.start()
    reading.join(20)
    assert not reading.is_alive()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_answer_the_same_whatever_is_written_to_their_folder(artifact, copied):
    """Rows and the dense part are written over, cut off and replaced by those of another model."""
    predictor = Predictor.load(artifact)
    with replicated(copied) as server, Load(server, predictor) as load:

        def more() -> None:
            right = load.right
            wait_for(lambda: load.right > right + 100 or load.wrong)

        more()
        before = server.replicas()
        for path in files_of(copied):
            write_over(path)
        more()
        for path in files_of(copied):
            os.truncate(path, path.stat().st_size // 2)
        more()
        for path in files_of(copied):
            path.with_name("new").write_bytes(os.urandom(1000))
            os.rename(path.with_name("new"), path)
        more()
        assert server.replicas() == before, "no replica has ended"
        # one that is started anew has what the others have
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: len(server.replicas()) == 2 and before[0] not in server.replicas())
        more()
        shutil.rmtree(copied)
        more()
    assert not load.wrong
