"""`rayrec serve --cluster` on two nodes: a replica that is killed returns, and all are ended."""

from __future__ import annotations

import os
import queue
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
from tests.leftovers import processes_with
from tests.ray.heads import ROOT, Head, can_unshare
from tests.unit.serve_worlds import an_artifact, rows
from tests.unit.served_processes import Asking, free_ports, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not can_unshare(), reason="a disk of its own for a node needs root and mount namespaces"
    ),
]
READY = r"replica (\d) on \S+ \(process (\d+)\): gRPC at (127.0.0.1:\d+), HTTP at 127.0.0.1:\d+$"


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


def actors(head: Head) -> list[int]:
    """Processes of replicas."""
    kept = []
    for pid in processes_with(head.mark):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::ReplicaActor"):
            kept.append(pid)
    return kept


def test_a_host_without_the_artifact_is_named(two_hosts: Head, hidden: Path, artifact: Path):
    subprocess.run(["cp", "-r", str(artifact), str(hidden / "artifact")], check=True)
    with serving(two_hosts, str(hidden / "artifact"), "--replicas", "2") as process:
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and out == "", out + errors
    wanted = (
        rf"error: replica \d on host \S+: {hidden}/artifact has no file manifest.json: the path"
    )
    assert re.match(wanted, errors) and errors.count("\n") == 1, errors
    wait_for(lambda: not actors(two_hosts))


def test_too_many_replicas_are_refused(two_hosts: Head, artifact: Path):
    with serving(two_hosts, str(artifact), "--replicas", "3") as process:
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and out == "" and errors.count("\n") == 1, out + errors
    assert "3 replicas of 1 CPUs have no room on the cluster, whose 2 nodes hold 2." in errors


def test_a_replica_that_is_killed_returns_and_all_are_ended(two_hosts: Head, artifact: Path):
    predictor = Predictor.load(artifact)
    port = free_ports(4)
    words = (str(artifact), "--replicas", "2", "--port", str(port))
    with serving(two_hosts, *words) as process:
        lines = Lines(process)
        first = [lines.until(READY) for _ in range(2)]
        assert {one[1] for one in first} == {"0", "1"}
        assert {one[3] for one in first} == {f"127.0.0.1:{port}", f"127.0.0.1:{port + 2}"}
        lines.until(rf"{artifact}: step 7, 2 replicas on \d hosts$")
        assert sorted(actors(two_hosts)) == sorted(int(one[2]) for one in first)
        number, victim, address = first[0][1], int(first[0][2]), first[0][3]
        other = first[1][3]
        with Load([address, other], predictor) as load:
            wait_for(lambda: min(load.right.values()) > 20)
            os.kill(victim, signal.SIGKILL)
            lines.until(rf"replica {number} on \S+ is lost: .*; Ray starts it again$")
            with Client(f"ipv4:{address},{other}", timeout_s=200) as both:
                load.check(both)
            right = dict(load.right)
            again = lines.until(READY)
            assert again[1] == number and int(again[2]) != victim and again[3] == address
            wait_for(lambda: load.right[address] > right[address] + 20)
            assert load.right[other] > right[other]
            assert load.unavailable[address] > 0 and load.unavailable[other] == 0
            os.kill(int(again[2]), signal.SIGSTOP)
            lines.until(rf"replica {number} hangs: silent for 6\d s; it is killed$")
            assert int(lines.until(READY)[2]) != int(again[2])
            wait_for(lambda: load.right[address] > right[address] + 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(200) == 0, lines.all()
        assert not load.wrong
        wait_for(lambda: not actors(two_hosts))
