"""A server that another process holds: what it says of itself, how it fails, and how it ends."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayrec.errors import ArtifactError, RayrecError
from rayrec.serve import Client, Predictor
from rayrec.serve.server.held import reserved
from rayrec.serve.server.hosted import HostedServer, HostReport
from rayrec.serve.server.settings import ServerSettings, ServerStatus
from tests.leftovers import processes_with
from tests.unit.documents import ROOT
from tests.unit.published_worlds import published_world
from tests.unit.serve_worlds import an_artifact, rows
from tests.unit.served_processes import MARK, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ASKED = rows(12, 5).drop_columns(["click"])
TWO = ServerSettings(port=0, http_port=0, replicas=2, poll_s=0.05)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return an_artifact(tmp_path_factory.mktemp("served"))


class Held(HostedServer):
    """A server whose lines are kept until they are taken."""

    def look(self) -> HostReport:
        report = self.report()
        self.lines = [*getattr(self, "lines", ()), *report.lines]
        return report


@contextmanager
def hosted(path: Path, settings: ServerSettings = TWO, **options) -> Iterator[Held]:
    server = Held(str(path), settings, **options)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.look().has_ended)


def status_of(server: Held) -> ServerStatus:
    wait_for(lambda: server.look().status is not None)
    return server.look().status


def ended(server: Held) -> tuple[RayrecError | None, list[str]]:
    wait_for(lambda: server.look().has_ended)
    return server.look().error, server.lines


def assert_answers(status: ServerStatus, predictor: Predictor) -> None:
    with Client(status.grpc, timeout_s=200) as client:
        answer = client.ask(ASKED)
    wanted = predictor.predict(ASKED).numpy()
    np.testing.assert_allclose(answer.scores, wanted, rtol=1e-5, atol=1e-6)
    assert (answer.version, answer.step) == (status.version, status.step)


def test_it_answers_tells_of_its_replicas_and_ends_in_order(artifact):
    predictor = Predictor.load(artifact)
    with (
        reserved(TWO) as taken,
        hosted(artifact, taken, version=predictor.weights.name, tries=2) as server,
    ):
        status = status_of(server)
        # both ports of the first pair are held here
        assert status.settings == replace(taken, port=taken.port + 2, http_port=taken.http_port + 2)
        assert_answers(status, predictor)
        (victim, _) = replicas_of(server)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: not server.look().has_ended and server.lines)
        assert f"(process {victim}) ended with code -9; it is started again" in server.lines.pop(0)
        wait_for(lambda: len(replicas_of(server)) == 2)
        server.terminate()
        assert ended(server) == (None, [])


def replicas_of(server: Held) -> list[int]:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def test_it_follows_a_chain_and_says_the_version(tmp_path):
    world = published_world(tmp_path / "chain", 0)
    world.publish()
    with hosted(world.folder, follow=True) as server:
        first = status_of(server)
        world.train(random.Random(0))
        world.publish()
        mine = Predictor.follow(world.folder)
        assert mine.weights.name != first.version
        wait_for(lambda: status_of(server).version == mine.weights.name)
        assert_answers(status_of(server), mine)
        server.terminate()
        assert ended(server) == (None, [])


def test_its_mistakes_keep_their_class(artifact, tmp_path):
    own = Predictor.load(artifact).weights.name
    for path, version, says in (
        (tmp_path, "", f"{tmp_path} has no file manifest.json"),
        (artifact, "8-0", f"{artifact} is version {own}, and the other hosts serve 8-0"),
    ):
        with hosted(path, version=version) as server:
            error, lines = ended(server)
        assert isinstance(error, ArtifactError) and str(error).startswith(says)
        assert server.look().status is None and lines == []


def test_one_that_is_killed_is_told_by_its_code(artifact):
    with hosted(artifact) as server:
        status_of(server)
        os.kill(server.pid, signal.SIGKILL)
        error, _ = ended(server)
        assert str(error) == "the server ended with code -9."


def test_one_that_hangs_is_killed(artifact, monkeypatch):
    monkeypatch.setattr("rayrec.serve.server.hosted.STARTING_S", 2.0)
    with hosted(artifact) as server:
        status_of(server)
        os.kill(server.pid, signal.SIGSTOP)
        error, lines = ended(server)
        assert re.fullmatch(r"the server hangs: silent for \d s; it is killed", lines[-1])
        assert str(error) == "the server ended with code -9."


HOLDER = """
import sys, time
from rayrec.serve.server.hosted import HostedServer
from rayrec.serve.server.settings import ServerSettings
server = HostedServer(sys.argv[1], ServerSettings(port=0, http_port=0))
while server.report().status is None:
    time.sleep(0.1)
print("ready", flush=True)
time.sleep(600)
"""


def test_it_ends_when_its_holder_is_killed(artifact):
    mark = f"hosted-{os.getpid()}"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(artifact)],
        env=os.environ | {"PYTHONPATH": str(ROOT), MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "ready\n"
        assert len(processes_with(mark)) == 3
        holder.kill()
    wait_for(lambda: not processes_with(mark))
