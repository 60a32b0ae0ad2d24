"""`rayrec serve` as processes: a replica that dies returns, and what ends answers what it has."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from rayrec.serve import Predictor
from tests.leftovers import processes_with
from tests.unit.documents import ROOT
from tests.unit.serve_worlds import an_artifact
from tests.unit.served_processes import Load, command, replicated, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return an_artifact(tmp_path_factory.mktemp("served"))


def test_a_replica_that_is_killed_returns_and_others_go_on(artifact):
    predictor = Predictor.load(artifact)
    with replicated(artifact) as one, Load(one, predictor) as load:
        wait_for(lambda: load.right > 100)
        before = one.replicas()
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
    assert not load.wrong


def test_sigterm_answers_what_is_there_and_ends_with_0(artifact):
    with replicated(artifact) as one:
        with Load(one, Predictor.load(artifact)) as load:
            wait_for(lambda: load.right > 100)
            one.process.send_signal(signal.SIGTERM)
            assert one.process.wait(200) == 0
            wait_for(lambda: load.unavailable > 0)
        assert not load.wrong
        assert not processes_with(one.mark)
        assert one.process.stderr.read() == ""


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
