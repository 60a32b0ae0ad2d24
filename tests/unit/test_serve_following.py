"""`rayrec serve --follow` as processes: every answer is that of the version that it names."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rayrec.errors import UnavailableError
from rayrec.serve import Client, Predictor
from tests.leftovers import processes_with
from tests.unit.documents import ROOT
from tests.unit.published_worlds import assert_equal, published_world
from tests.unit.serve_worlds import rows
from tests.unit.test_serve_replicas import MARK, Server, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ASKED = rows(12, 5).drop_columns(["click"])
DELTAS = 12


@contextmanager
def following(folder: Path, *options: str):
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "rayrec.cli.main", "serve", "--follow", str(folder)]
    process = subprocess.Popen(
        [*command, "--replicas", "2", "--port", "0", "--poll", "0.05", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder.parent), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        ports = re.search(r"2 replicas, gRPC at [\d.]+:(\d+), HTTP at [\d.]+:(\d+)$", line)
        assert ports, line + process.stderr.read()
        yield Server(process, int(ports[1]), int(ports[2]), mark)
    finally:
        process.kill()
        process.communicate()
        wait_for(lambda: not processes_with(mark))


class Answers:
    """Clients that ask without a pause, and keep what they were told."""

    def __init__(self, server: Server, asked: pa.Table = ASKED) -> None:
        self._server, self._asked, self._ended = server, asked, threading.Event()
        self.told: list[tuple[str, int, np.ndarray]] = []
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def __enter__(self) -> Answers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._ended.is_set():
            # a new connection now and then, so that every replica has some
            with Client(f"127.0.0.1:{self._server.port}", timeout_s=200) as client:
                for _ in range(10):
                    try:
                        answer = client.ask(self._asked)
                    except UnavailableError:
                        continue
                    except Exception as error:
                        self.errors.append(error)
                        return
                    self.told.append((answer.version, answer.step, answer.scores))


def said(server: Server) -> dict[str, str]:
    """What a replica says of itself; asked again where it is the one that was killed."""
    for _ in range(3):
        with suppress(OSError):
            return json.loads(server.get("/health"))
    raise AssertionError("no replica answers")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_every_answer_under_load_is_that_of_one_version(tmp_path):
    rng, world = random.Random(0), published_world(tmp_path / "chain", 0)
    world.publish()
    mine = Predictor.follow(world.folder)
    wanted = {mine.weights.name: mine.predict(ASKED).numpy()}
    with following(world.folder) as server, Answers(server) as load:
        victim = server.replicas()[0]
        for number in range(DELTAS):
            world.train(rng)
            world.publish()
            assert mine.refresh() == 1
            wanted[mine.weights.name] = mine.predict(ASKED).numpy()
            if number == DELTAS // 2:
                os.kill(victim, signal.SIGKILL)
            if number % 3 == 0:
                wait_for(lambda: said(server)["version"] == mine.weights.name)
        wait_for(lambda: len(server.replicas()) == 2 and victim not in server.replicas())
        seen = len(load.told)
        wait_for(lambda: len(load.told) > seen + 200)
        metrics = server.get("/metrics").decode()
        assert f"rayrec_serve_step {float(world.step)}" in metrics
        assert 'rayrec_serve_chain{state="current"} 1.0' in metrics
        assert server.number("rayrec_serve_staleness_seconds") > 0
    assert not load.errors
    for version, step, scores in load.told:
        assert version.startswith(f"{step}-")
        np.testing.assert_allclose(scores, wanted[version], rtol=1e-5, atol=1e-6)
    assert len({version for version, _, _ in load.told}) > 3
    assert {version for version, _, _ in load.told[-100:]} == {mine.weights.name}
    assert_equal(mine, world.fresh(tmp_path / "fresh"), ASKED.to_pylist())


def test_what_is_damaged_or_forked_is_not_served(tmp_path):
    rng, world, served = (
        random.Random(1),
        published_world(tmp_path / "chain", 1),
        tmp_path / "served",
    )

    def bring(name: str) -> Path:
        return Path(shutil.copytree(world.folder / name, served / name))

    bring(world.publish())
    with following(served, "--in-place") as server:
        versions = [said(server)["version"]]
        for _ in range(2):
            world.train(rng)
            bring(world.publish())
            wait_for(lambda: said(server)["version"] not in versions)
            versions.append(said(server)["version"])
        world.train(rng)
        name = world.publish()
        shutil.copytree(world.folder / name, tmp_path / "damaged")
        flip(tmp_path / "damaged" / "dense.pt")
        os.rename(tmp_path / "damaged", served / name)
        wait_for(lambda: said(server)["chain"] == "damaged")
        assert "dense.pt is damaged" in said(server)["trouble"]
        assert said(server)["version"] == versions[-1]
        shutil.copy(world.folder / name / "dense.pt", served / name / "dense.pt")
        wait_for(lambda: said(server)["chain"] == "current")
        assert said(server)["version"] not in versions
        other = published_world(tmp_path / "other", 1)
        other.publish()
        other.train(rng)
        shutil.rmtree(served)
        shutil.copytree(other.folder, served)
        wait_for(lambda: said(server)["chain"] == "fork")
        other.publish()
        shutil.copytree(other.folder, served, dirs_exist_ok=True)
        time.sleep(0.5)
        assert said(server)["chain"] == "fork"
