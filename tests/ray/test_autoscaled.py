"""Ray's own autoscaler over nodes of this machine: an elastic run on a head without CPUs, from
`ray job submit` to the last idle node that goes.

Ray's provider for such nodes starts a real raylet per node. docs/cluster.md tells of this walk.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrec.errors import ConfigError
from rayrec.watch import RunEvent, read_events
from tests.clicks import write_clicks
from tests.leftovers import processes_with
from tests.ray import worlds
from tests.ray.heads import BIN, ROOT, Head, started_head

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "walk_job.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data of the run."""
    write_clicks(
        tmp_path,
        rows_train=8000,
        rows_eval=500,
        num_features=6,
        num_dense=3,
        dim=8,
        cap=200,
        seed=3,
    )
    (tmp_path / "slow").touch()
    return tmp_path


@pytest.fixture
def head(private_home: Path) -> Iterator[Head]:
    """A head without CPUs, whose autoscaler may start two nodes of one CPU."""
    nodes = {"ranks": {"resources": {"CPU": 1, "object_store_memory": 100_000_000}}}
    with started_head(private_home, num_cpus=0, autoscaled=nodes) as head:
        yield head


def raylets(head: Head) -> list[int]:
    """The processes of the cluster's nodes, but the head's."""
    nodes = []
    for pid in processes_with(head.mark):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/raylet") and b"--head" not in words:
            nodes.append(pid)
    return nodes


def wait_for(what: Callable[[], Any], job: subprocess.Popen[str], log: Path) -> None:
    """Wait until something is so, while the job goes on."""
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline and job.poll() is None, log.read_text()[-4000:]
        time.sleep(0.2)


def story(run: Path) -> list[RunEvent]:
    """The events of the run so far."""
    try:
        return list(read_events(run).events)
    except ConfigError:  # it has none yet
        return []


def trains_on_both(run: Path) -> bool:
    """Return True if a window of training has ended since the run has both nodes."""
    ranks, trained = 0, False
    for event in story(run):
        if event.kind in ("start", "recovery", "resize"):
            ranks = event.values.get("world_size", event.values.get("ranks", ranks))
            trained = False
        trained |= event.kind == "window"
    return ranks == 2 and trained


def resizes(run: Path) -> list[int]:
    """The numbers of ranks with which the run went on."""
    return [event.values["ranks"] for event in story(run) if event.kind == "resize"]


def test_nodes_come_are_lost_return_and_go(head: Head, folder: Path) -> None:
    log = folder / "job.log"
    words = [str(BIN / "ray"), "job", "submit", "--address", head.address]
    # Nothing is sent: nodes of one machine share the folder of what is, and the next one that comes
    # writes it anew under the ranks, which cannot load torch without a working directory.
    words += ["--", "python", str(JOB)]
    assert not raylets(head), "nothing asks for a node"
    with log.open("w") as out:
        job = subprocess.Popen(
            [*words, str(folder), "1", "2"],
            env=head.env,
            text=True,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            told = log.read_text
            run = folder / "walk"
            # Ray's nodes of one machine may flap while they come, and take a rank with them
            wait_for(lambda: trains_on_both(run) and len(raylets(head)) == 2, job, log)
            before = resizes(run)
            lost = sum(event.kind == "recovery" for event in story(run))
            os.kill(raylets(head)[0], signal.SIGKILL)
            wait_for(lambda: resizes(run) == [*before, 1, 2], job, log)
            (folder / "slow").unlink()
            assert job.wait(300) == 0, told()[-4000:]
        finally:
            job.kill()
    print(told())
    changes = f"{lost + 1} failures, {len(before) + 2} resizes"
    assert f"done: step 600, {changes}, 2 ranks" in told()
    deadline = time.monotonic() + 60
    while raylets(head):
        assert time.monotonic() < deadline, "an idle node stays"
        time.sleep(0.5)
    calm = subprocess.run(
        [sys.executable, str(JOB), str(folder), "0", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    worlds.compare(calm.stdout.split()[-1], str(folder / "walk" / "step-00000600"))
