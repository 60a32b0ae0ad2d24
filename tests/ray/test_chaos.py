"""`rayrec chaos` with real signals: a job is killed, frozen and started again, and ends the same.

The command runs in a process of its own and starts a cluster of its own, as a user would have it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayrec.chaos import cluster
from rayrec.chaos.cluster import head_ports
from rayrec.chaos.job import Job
from rayrec.data.synthetic import SyntheticPaths
from tests.leftovers import processes_with
from tests.ray.heads import ROOT
from tests.words import sets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(
    clicks: SyntheticPaths, folder: Path, *options: str, steps: int = 400, more: str = ""
) -> list[str]:
    job = [sys.executable, "-m", "jobs.train_dlrm", "--ranks", "2", "--plan", "row_wise"]
    job += ["--checkpoint-dir", str(folder)]
    job += sets(
        f"data.train={clicks.train}",
        f"data.schema={clicks.schema}",
        f"run.steps={steps}",
        "run.global_batch_size=256",
        "run.heartbeat_timeout_s=5",
        "run.checkpoint.every_n_steps=20",
        "run.checkpoint.num_to_keep=2",
        *more.split(),
    )
    return [sys.executable, "-m", "rayrec.cli.main", "chaos", *options, "--", *job]


def environment(mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", name: value}


def expect_nothing_left(mark: str, tmp: Path) -> None:
    deadline = time.monotonic() + 30
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left and not list(tmp.glob("rc-*"))


def test_a_kill_a_freeze_and_a_driver_kill_end_with_the_same_tables(
    clicks: SyntheticPaths, tmp_path: Path, mark: str
) -> None:
    out = tmp_path / "out.json"
    short = Path("/tmp") / f"c{os.getpid()}"  # the path of a Unix socket has room for 107 bytes
    short.mkdir()
    words = command(
        clicks,
        tmp_path / "runs",
        *("--every", "6s", "--driver", "--faults", "3", "--seed", "5", "--out", str(out)),
        steps=2000,
    )
    env = {**environment(mark), "TMPDIR": str(short)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    (run,) = told["runs"]
    assert sorted(blow["kind"] for blow in run["blows"]) == ["KILL", "STOP", "driver"]
    assert run["verdict"] == "same tables" and len(run["digests"]) > 3
    assert run["digests"] == told["calm"]["digests"] and run["digests"]["the last step"] == "2000"
    assert run["account"]["waits"] and "same tables" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "runs").exists()
    expect_nothing_left(mark, short)
    short.rmdir()


def test_kills_at_their_moments_beside_a_silent_control_service(
    clicks: SyntheticPaths, tmp_path: Path, mark: str
) -> None:
    out, wanted = tmp_path / "out.json", ["start", "join", "save", "recover"]
    words = command(
        clicks,
        tmp_path / "runs",
        *("--every", "2s", "--signals", "KILL", "--at", ",".join(wanted), "--gcs"),
        *("--faults", "6", "--seed", "3", "--out", str(out)),
        more="scaling.spares=1",
    )
    env = environment(mark)
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    blows = json.loads(out.read_text())["runs"][0]["blows"]
    moments = [blow["moment"] for blow in blows if blow["kind"] == "KILL"]
    assert len(set(moments)) >= 3 and set(moments) <= set(wanted)
    assert len(moments) + sum(blow["kind"] == "gcs" for blow in blows) == len(blows) == 6
    expect_nothing_left(mark, Path("/nowhere"))


def test_a_job_that_hangs_or_fails_is_told_and_leaves_nothing(
    clicks: SyntheticPaths, tmp_path: Path, mark: str
) -> None:
    """The bound on a hang is shorter than the start of a job, so that the calm run hangs."""
    for options, more, code, says in (
        (("--timeout", "1s"), "", 1, "the job hung without any fault: no new step for"),
        ((), "run.seed=x", 2, "the job's own mistake: --set run.seed=x: [run] seed is 'x'"),
    ):
        words = command(clicks, tmp_path / "runs", *options, more=more)
        env = environment(mark)
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == code and says in done.stderr, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) == 1
    expect_nothing_left(mark, Path("/nowhere"))


def test_a_port_that_is_taken_meanwhile_is_replaced(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first ports, something else has the one that drivers join."""
    tries = []

    def ports() -> dict[str, int]:
        tries.append(head_ports())
        return {**tries[0], "--port": taken.getsockname()[1]} if len(tries) == 1 else tries[-1]

    monkeypatch.setattr(cluster, "head_ports", ports)
    monkeypatch.setenv(*mark.split("="))
    job = Job(words=("true",), settings={}, folder=tmp_path, ranks=1, cpus=1.0)
    code = "import ray; ray.init(); print('joined', len(ray.nodes()))"
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        cluster.private_cluster(job, nodes=1) as started,
    ):
        address = started.env["RAY_ADDRESS"]
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=started.env, capture_output=True, text=True, timeout=120)
    assert "joined 1" in done.stdout, done.stderr
    assert len(tries) == 2 and address == f"127.0.0.1:{tries[1]['--port']}"
    expect_nothing_left(mark, Path("/nowhere"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process(
    clicks: SyntheticPaths, tmp_path: Path, mark: str, number: signal.Signals
) -> None:
    words = command(clicks, tmp_path / "runs", steps=1_000_000)
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.readline()
        assert "without faults" in first, process.stderr.read()
        deadline = time.monotonic() + 120
        while not list((tmp_path / "runs").glob("calm/step-*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    expect_nothing_left(mark, Path("/nowhere"))
