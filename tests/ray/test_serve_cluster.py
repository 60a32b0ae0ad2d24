"""`rayrec serve --cluster` on several nodes: what is lost returns, a chain is followed, all end."""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rayrec.errors import UnavailableError
from rayrec.serve import Client, Predictor
from tests.ray.heads import ROOT, Head, can_unshare, node_with_own_disk, processes_of_command
from tests.unit.published_worlds import published_world
from tests.unit.serve_worlds import an_artifact, rows
from tests.unit.served_processes import Asking, free_ports, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not can_unshare(), reason="a disk of its own for a node needs root and mount namespaces"
    ),
]
READY = r"host \S+ \(process (\d+)\): 1 replicas, gRPC at (127.0.0.1:\d+), HTTP at 127.0.0.1:\d+$"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return an_artifact(tmp_path_factory.mktemp("served"))


class Lines:
    """What a process prints, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._lines = process, queue.Queue()
        self.seen: list[str] = []
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream) -> None:
        for line in stream:
            self._lines.put(line.rstrip("\n"))

    def all(self) -> str:
        """All that was printed, of a process that has ended."""
        time.sleep(1.0)
        while not self._lines.empty():
            self.seen.append(self._lines.get())
        return "\n".join(self.seen)

    def until(self, pattern: str, seconds: float = 300.0) -> re.Match[str]:
        end = time.monotonic() + seconds
        while True:
            is_over = self._process.poll() is not None or time.monotonic() > end
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                assert not is_over, "\n".join(["no " + pattern, *self.seen])
                continue
            self.seen.append(line)
            match = re.search(pattern, line)
            if match:
                return match


class Load(Asking):
    """A client of each address that compares all scores."""

    def __init__(self, addresses: list[str], predictor: Predictor) -> None:
        super().__init__(addresses)
        tables = [rows(count, count).drop_columns(["click"]) for count in (1, 3, 20)]
        self._given = [(table, predictor.predict(table).numpy()) for table in tables]
        self.right = dict.fromkeys(addresses, 0)
        self.unavailable = dict.fromkeys(addresses, 0)
        self.wrong: list[object] = []

    def ask(self, address: str) -> None:
        with Client(address, timeout_s=200) as client:
            while not self.ended.is_set():
                try:
                    self.check(client)
                except UnavailableError:
                    self.unavailable[address] += 1
                    time.sleep(0.05)
                    continue
                except BaseException as error:
                    self.wrong.append(error)
                    return
                self.right[address] += 1

    def check(self, client: Client) -> None:
        """Ask for all tables once, and see that the scores are right."""
        for table, wanted in self._given:
            np.testing.assert_allclose(client.predict(table), wanted, rtol=1e-5, atol=1e-6)


@contextmanager
def serving(head: Head, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rayrec.cli.main", "serve", *words, "--cluster", head.gcs],
        env={**head.env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def actors(head: Head) -> set[int]:
    """Processes of the actors of hosts."""
    return processes_of_command(head, b"ray::HostedServer")


def raylets(head: Head) -> set[int]:
    """Processes that end with their node."""
    return processes_of_command(head, b"raylet/raylet")


def test_a_host_without_the_artifact_is_named(two_hosts: Head, hidden: Path, artifact: Path):
    subprocess.run(["cp", "-r", str(artifact), str(hidden / "artifact")], check=True)
    with serving(two_hosts, str(hidden / "artifact"), "--replicas", "2") as process:
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and out == "", out + errors
    wanted = rf"error: host \S+: {hidden}/artifact has no file manifest.json: the path"
    assert re.match(wanted, errors) and errors.count("\n") == 1, errors
    wait_for(lambda: not actors(two_hosts))


def test_too_many_replicas_are_refused(two_hosts: Head, artifact: Path):
    with serving(two_hosts, str(artifact), "--replicas", "3") as process:
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and out == "" and errors.count("\n") == 1, out + errors
    assert "3 replicas of 1 CPUs have no room on the cluster, whose 2 nodes hold 2." in errors


def children(pid: int) -> list[int]:
    """Processes that a process has started, on any of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_what_is_lost_returns_and_all_are_ended(two_hosts: Head, artifact: Path):
    predictor = Predictor.load(artifact)
    port = free_ports(4)
    words = (str(artifact), "--replicas", "2", "--port", str(port))
    with serving(two_hosts, *words) as process:
        lines = Lines(process)
        first = [lines.until(READY) for _ in range(2)]
        assert {one[2] for one in first} == {f"127.0.0.1:{port}", f"127.0.0.1:{port + 2}"}
        lines.until(rf"{artifact}: step 7, 2 replicas on 2 hosts$")
        assert actors(two_hosts) == {int(one[1]) for one in first}
        actor, address, other = int(first[0][1]), first[0][2], first[1][2]
        with Load([address, other], predictor) as load:
            wait_for(lambda: min(load.right.values()) > 20)
            (supervisor,) = children(actor)
            (victim,) = children(supervisor)
            os.kill(victim, signal.SIGKILL)
            lines.until(rf"host \S+: replica 0 \(process {victim}\) ended with code -9; it is star")
            right = dict(load.right)
            wait_for(lambda: load.right[address] > right[address] + 20)
            os.kill(actor, signal.SIGKILL)
            lines.until(r"host \S+: it is lost: .* It is started again in 0.1 s$")
            with Client(f"ipv4:{address},{other}", timeout_s=200) as both:
                load.check(both)
            right = dict(load.right)
            again = lines.until(READY)
            assert int(again[1]) != actor and again[2] == address
            wait_for(lambda: load.right[address] > right[address] + 20)
            assert load.right[other] > right[other]
            assert load.unavailable[address] > 0 and load.unavailable[other] == 0
            os.kill(int(again[1]), signal.SIGSTOP)
            lines.until(r"host \S+ hangs: silent for 6\d s; it is killed$")
            assert int(lines.until(READY)[1]) != int(again[1])
            right = dict(load.right)
            wait_for(lambda: load.right[address] > right[address] + 20)
            process.send_signal(signal.SIGTERM)
            assert process.wait(200) == 0, lines.all()
        assert not load.wrong
        wait_for(lambda: not actors(two_hosts))


def test_a_chain_is_followed_on_all_hosts_also_on_a_node_that_comes_later(
    two_hosts: Head, hidden: Path, tmp_path: Path
):
    world = published_world(tmp_path / "chain", 0)
    world.publish()
    words = ["--follow", str(world.folder), "--replicas", "3", "--port", "0", "--poll", "0.05"]
    before = raylets(two_hosts)
    with node_with_own_disk(two_hosts, hidden):
        (third,) = raylets(two_hosts) - before
        with serving(two_hosts, *words) as process:
            lines = Lines(process)
            addresses = {lines.until(READY)[2] for _ in range(3)}
            assert len(addresses) == 3
            lines.until(rf"{world.folder}: step \d+, 3 replicas on 3 hosts$")
            world.train(random.Random(0))
            world.publish()
            newest = Predictor.follow(world.folder)
            told = {lines.until(r"host \S+: now at step \d+, version (\S+)$")[1] for _ in range(3)}
            assert told == {newest.weights.name}
            for address in addresses:
                assert_follows(address, newest)
            os.kill(third, signal.SIGKILL)
            lines.until(r"host \S+: it is lost: .* It is started again")
            with node_with_own_disk(two_hosts, hidden):
                assert_follows(lines.until(READY)[2], newest)
                process.send_signal(signal.SIGTERM)
                assert process.wait(200) == 0, lines.all()


def assert_follows(address: str, predictor: Predictor) -> None:
    asked = rows(12, 5).drop_columns(["click"])
    with Client(address, timeout_s=200) as client:
        answer = client.ask(asked)
    wanted = predictor.predict(asked).numpy()
    np.testing.assert_allclose(answer.scores, wanted, rtol=1e-5, atol=1e-6)
    assert answer.version == predictor.weights.name
