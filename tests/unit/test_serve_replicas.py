"""`rayrec serve` as processes: a replica that dies returns, and what ends answers what it has."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from rayrec.serve import Predictor
from rayrec.serve.wire import METHOD, SERVICE
from tests.leftovers import processes_with
from tests.unit.documents import ROOT
from tests.unit.serve_worlds import an_artifact, rows
from tests.unit.served_processes import Asking, Load, Server, command, replicated, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return an_artifact(tmp_path_factory.mktemp("served"))


def test_a_replica_that_is_killed_returns_and_others_go_on(artifact):
    predictor = Predictor.load(artifact)
    with replicated(artifact) as one, Load(one, predictor) as load:
        wait_for(lambda: load.right > 100)
        before, files = one.replicas(), os.listdir(numbers_of(artifact))
        for victim in before:
            right = load.right
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: load.right > right + 100)  # noqa: B023
            wait_for(lambda: len(one.replicas()) == 2 and victim not in one.replicas())  # noqa: B023
        assert not set(before) & set(one.replicas())
        wait_for(lambda: one.number("rayrec_serve_starts_total") == 4)
        pids = set()
        wait_for(lambda: pids.add(json.loads(one.get("/health"))["pid"]) or len(pids) == 2)
        assert pids == set(one.replicas())
        live = one.get("/metrics").decode()
        version = f"7-{predictor.manifest.sha256[:12]}"
        assert f'rayrec_serve_replicas{{version="{version}"}} 2.0' in live
        wait_for(lambda: one.number("rayrec_serve_batch_rows_count") > 200)
        assert sorted(os.listdir(numbers_of(artifact))) == sorted(files)
    assert not load.wrong


def numbers_of(artifact: Path) -> Path:
    """The folder of the numbers of the newest server; others were killed, and left theirs."""
    return max(artifact.parent.glob("rayrec-serve-*"), key=lambda path: path.stat().st_mtime_ns)


def test_sigterm_answers_what_is_there_and_ends_with_0(artifact):
    with replicated(artifact) as one:
        with Load(one, Predictor.load(artifact)) as load:
            wait_for(lambda: load.right > 100)
            one.process.send_signal(signal.SIGTERM)
            assert one.process.wait(200) == 0, one.process.stderr.read()
            wait_for(lambda: load.unavailable > 0)
        assert not load.wrong
        assert not processes_with(one.mark)
        assert one.process.stderr.read() == ""


def test_calls_whose_request_does_not_come_hold_up_no_end(artifact):
    """One by gRPC is left long before the time for answers is over; one by HTTP, then."""
    ended = threading.Event()
    with replicated(artifact, "--drain", "150") as one, grpc.insecure_channel(one.address) as link:
        call = link.stream_unary(f"/{SERVICE}/{METHOD}").future(ended.wait() for _ in [0])
        wait_for(lambda: call.running())
        assert one.get("/ready")
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(100) == 0, one.process.stderr.read()
        ended.set()
    with (
        replicated(artifact, "--drain", "4") as one,
        socket.create_connection(("127.0.0.1", one.http_port)) as link,
    ):
        link.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        assert one.get("/ready")
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(200) == 0, one.process.stderr.read()


def test_a_replica_that_hangs_is_replaced_while_others_go_on(artifact):
    with replicated(artifact) as one, Load(one, Predictor.load(artifact)) as load:
        wait_for(lambda: load.right > 100)
        victim, other = one.replicas()
        os.kill(victim, signal.SIGSTOP)
        wait_for(lambda: victim not in one.replicas() and len(one.replicas()) == 2)
        assert other in one.replicas()
        line = one.process.stderr.readline()
        assert line.startswith("replica ") and " hangs: silent for 2" in line
        assert f"(process {victim}) ended with code -9" in one.process.stderr.readline()
        right = load.right
        wait_for(lambda: load.right > right + 100)
    assert not load.wrong


class KeptAlive(Asking):
    """HTTP clients, each with a connection that it keeps until it is told to close it."""

    def __init__(self, server: Server, count: int) -> None:
        super().__init__([f"127.0.0.1:{server.http_port}"] * count)
        self.right, self.told, self.lost = 0, 0, []

    def ask(self, address: str) -> None:
        link = http.client.HTTPConnection(address, timeout=200)
        body = json.dumps({"columns": rows(2, 1).drop_columns(["click"]).to_pydict()})
        while not self.ended.wait(0.02):
            try:
                link.request("POST", "/predict", body, {"content-type": "application/json"})
                answer = link.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(error)
                return
            assert answer.status == 200
            self.right += 1
            if answer.getheader("connection") == "close":
                self.told += 1
                return


def test_a_client_that_keeps_its_connection_loses_no_request_at_the_end(artifact):
    with replicated(artifact, "--lame-duck", "8") as one, KeptAlive(one, 8) as clients:
        wait_for(lambda: clients.right > 100)
        one.process.send_signal(signal.SIGTERM)
        wait_for(lambda: clients.told == 8 or clients.lost)
        # others are still answered, and told to go elsewhere
        with pytest.raises(urllib.error.HTTPError, match="503"):
            one.get("/ready")
        assert json.loads(one.get("/health"))["status"] == "alive"
        assert one.process.wait(200) == 0
    assert not clients.lost


def test_a_replica_without_file_descriptors_says_it_in_a_line(artifact):
    with replicated(artifact) as one, ExitStack() as stack:
        for pid in one.replicas():
            used = len(os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, used + 2))
        for _ in range(40):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", one.http_port)))
            link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        line = one.process.stderr.readline()
        assert line.startswith("socket.accept() out of system resource: [Errno 24]")
        one.process.kill()
        rest = one.process.stderr.read()
        assert "Traceback" not in rest and rest.count("\n") < 10


def test_a_server_outlives_a_start_that_the_system_refuses(artifact):
    with replicated(artifact) as one, Load(one, Predictor.load(artifact)) as load:
        victim, other = one.replicas()
        used = resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE)
        # The lowest five are open, and no more can be. Fewer would be a reason for the kernel to
        # refuse the server's wait, which is for as many: two of each replica, and its own.
        resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, (5, used[1]))
        time.sleep(1.5)  # it waits anew each second
        os.kill(victim, signal.SIGKILL)
        assert f"(process {victim}) ended with code -9" in one.process.stderr.readline()
        for wait_s in ("0.2", "0.4"):
            assert one.process.stderr.readline() == (
                "replica 0 cannot be started: [Errno 24] Too many open files; it is started again "
                f"in {wait_s} s\n"
            )
        assert one.replicas() == [other]
        right = load.right
        wait_for(lambda: load.right > right + 100)
        resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, used)
        wait_for(lambda: len(one.replicas()) == 2)
        wait_for(lambda: re.search(rb"rayrec_serve_replicas.* 2.0\n", one.get("/metrics")))
    assert not load.wrong


def test_a_server_outlives_the_folder_of_its_numbers(artifact):
    with replicated(artifact) as one, Load(one, Predictor.load(artifact)) as load:
        wait_for(lambda: load.right > 100)
        folder = numbers_of(artifact)
        shutil.rmtree(folder)
        victim, other = one.replicas()
        os.kill(victim, signal.SIGKILL)
        line = one.process.stderr.readline()
        assert f"(process {victim}) ended with code -9; it is started again in 0.1 s" in line
        wait_for(lambda: len(one.replicas()) == 2 and victim not in one.replicas())
        assert other in one.replicas()
        wait_for(lambda: re.search(rb"rayrec_serve_replicas.* 1.0\n", one.get("/metrics")))
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(200) == 0
    assert not load.wrong and not folder.exists()


def test_replicas_end_with_a_server_that_is_killed(artifact):
    with replicated(artifact) as one:
        assert len(processes_with(one.mark)) == 3
        one.process.kill()
        wait_for(lambda: not processes_with(one.mark))


def test_a_port_that_is_taken_is_refused_also_by_another_server(artifact):
    with replicated(artifact) as one, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for port in (one.port, other.getsockname()[1]):
            done = subprocess.run(
                command(artifact, "--port", str(port), "--http-port", "0"),
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 2 and done.stdout == ""
            assert f"cannot listen at 127.0.0.1:{port} (port): " in done.stderr
            assert done.stderr.count("\n") == 1
