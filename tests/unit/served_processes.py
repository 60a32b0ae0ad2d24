"""Servers as processes for tests, and clients that ask them without a pause."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from rayrec.errors import UnavailableError
from rayrec.serve import Client, Predictor
from tests.leftovers import processes_with
from tests.unit.documents import ROOT
from tests.unit.serve_worlds import rows

MARK = "RAYREC_SERVE_TEST"


class Server(NamedTuple):
    """A server of two replicas: its process, its ports and the mark of its processes."""

    process: subprocess.Popen[str]
    port: int
    http_port: int
    mark: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=30) as said:
            return said.read()

    def number(self, name: str) -> float:
        """A metric without labels."""
        return float(re.search(rf"^{name} (\S+)$", self.get("/metrics").decode(), re.M)[1])

    def replicas(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


def wait_for(holds: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody has."""
    # Two tests beside each other begin at different places.
    candidates = range(21000, 32000, count)
    for first in random.SystemRandom().sample(candidates, len(candidates)):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no ports")


def command(artifact: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "rayrec.cli.main", "serve", str(artifact), *options]


@contextmanager
def replicated(artifact: Path, *options: str) -> Iterator[Server]:
    """A server of two replicas of an artifact."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command(artifact, "--replicas", "2", "--port", "0", *options),
        # a server that is killed leaves the folder of its numbers
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(artifact.parent), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        ports = re.search(r"step 7, 2 replicas, gRPC at [\d.]+:(\d+), HTTP at [\d.]+:(\d+)$", line)
        assert ports, line + process.stderr.read()
        yield Server(process, int(ports[1]), int(ports[2]), mark)
    finally:
        process.kill()
        process.communicate()
        wait_for(lambda: not processes_with(mark))


@contextmanager
def following(folder: Path, *options: str) -> Iterator[Server]:
    """A server of two replicas that follows a chain."""
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
        assert ports, line
        yield Server(process, int(ports[1]), int(ports[2]), mark)
    finally:
        process.kill()
        process.communicate()
        wait_for(lambda: not processes_with(mark))


class Asking(ABC):
    """Threads that ask without a pause, as `ask` of a class of this kind does, until the block is
    left.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.ended = threading.Event()
        self._threads = [threading.Thread(target=self.ask, args=(one,)) for one in addresses]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()

    @abstractmethod
    def ask(self, address: str) -> None:
        """Ask one server until `ended` is set."""


class Answers(Asking):
    """Clients that keep what they were told."""

    def __init__(self, server: Server, asked: pa.Table) -> None:
        super().__init__([server.address] * 4)
        self._asked = asked
        self.told: list[tuple[str, int, np.ndarray]] = []
        self.times: set[tuple[int, int | None, float | None]] = set()
        self.errors: list[Exception] = []

    def ask(self, address: str) -> None:
        while not self.ended.is_set():
            # a new connection now and then, so that every replica has some
            with Client(address, timeout_s=200) as client:
                for _ in range(10):
                    try:
                        answer = client.ask(self._asked)
                    except UnavailableError:
                        continue
                    except Exception as error:
                        self.errors.append(error)
                        return
                    self.told.append((answer.version, answer.step, answer.scores))
                    self.times.add(answer[2:])


class Load(Asking):
    """Some clients that compare all scores."""

    def __init__(self, server: Server, predictor: Predictor) -> None:
        super().__init__([server.address] * 6)
        tables = [rows(count, count).drop_columns(["click"]) for count in (1, 3, 20)]
        self._given = [(table, predictor.predict(table).numpy()) for table in tables]
        self.right = self.unavailable = 0
        self.wrong: list[object] = []

    def ask(self, address: str) -> None:
        while not self.ended.is_set():
            # a new connection now and then, so that every replica has some
            with Client(address, timeout_s=200) as client:
                for table, wanted in self._given * 5:
                    if self.ended.is_set():
                        return
                    try:
                        scores = client.predict(table)
                    except UnavailableError:
                        self.unavailable += 1
                        continue
                    except Exception as error:
                        self.wrong.append(error)
                        return
                    if not np.allclose(scores, wanted, rtol=1e-5, atol=1e-6):
                        self.wrong.append(scores)
                    self.right += 1


def said(server: Server) -> dict[str, str]:
    """What a replica says of itself; asked again where it is the one that was killed."""
    for _ in range(3):
        with suppress(OSError):
            return json.loads(server.get("/health"))
    raise AssertionError("no replica answers")
