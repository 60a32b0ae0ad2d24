"""Two nodes with disks of their own, as the hosts of a cluster are: what only one of them sees is
refused before training.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rayrec.data.synthetic import SyntheticPaths
from tests.leftovers import processes_with
from tests.ray.heads import ROOT, Head, can_unshare
from tests.words import sets

ROWS = sets("data.planted.rows_train=3000", "data.planted.rows_eval=500")
RUN = (*ROWS, "--ranks", "2", *sets("run.global_batch_size=512"))
SMALL = (*RUN, *sets("run.steps=2"))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not can_unshare(), reason="a disk of its own for a node needs root and mount namespaces"
    ),
]


def test_a_relative_folder_means_the_drivers_own_and_must_be_shared(
    two_hosts: Head, hidden: Path, tmp_path: Path
) -> None:
    wait = sets("scaling.placement_timeout_s=60")  # the second node may still be on its way
    done = two_hosts.run(tmp_path, "jobs.train_dlrm", *SMALL, *wait, "--checkpoint-dir", "runs/a")
    assert done.returncode == 0, done.stderr
    assert f"checkpoint: {tmp_path}/runs/a/step-00000002" in done.stdout
    done = two_hosts.run(hidden, "jobs.train_dlrm", *SMALL, *wait, "--checkpoint-dir", "runs/a")
    assert done.returncode == 2 and "step 1/" not in done.stdout
    assert (
        f"error: the run's folder {hidden}/runs/a is not shared by all hosts: rank 1 of 2 on "
        in done.stderr
    )
    assert done.stderr.count("\n") == 1 and not (hidden / "runs" / "a").exists()


def test_data_and_checkpoints_must_be_on_every_host(
    two_hosts: Head, hidden: Path, clicks: SyntheticPaths, tmp_path: Path
) -> None:
    data = hidden / "train"
    data.mkdir()
    (part,) = clicks.train.glob("*.parquet")
    (data / part.name).write_bytes(part.read_bytes())
    rows = sets(f"data.train={data}", f"data.schema={clicks.schema}")
    words = (*rows, "--ranks", "2", *sets("run.steps=2", "scaling.placement_timeout_s=60"))
    done = two_hosts.run(tmp_path, "jobs.train_dlrm", *words)
    assert done.returncode == 2
    assert (
        "error: the data are not on every host: rank 1 of 2 on " in done.stderr
        and f"does not see {data}/{part.name}" in done.stderr
    )


def test_a_killed_raylet_is_named(two_hosts: Head, tmp_path: Path) -> None:
    """The last test here: the second node is gone afterwards."""
    words = (*RUN, *sets("run.steps=1000000"))
    env = {**two_hosts.env, "RAY_ADDRESS": two_hosts.gcs, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "jobs.train_dlrm",
        *words,
        *sets("scaling.placement_timeout_s=60"),
    ]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("step "):
                break
        (raylet,) = [pid for pid in processes_with(two_hosts.mark) if is_worker_raylet(pid)]
        os.kill(raylet, signal.SIGKILL)
        _, errors = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 1
    last = errors.splitlines()[-1]
    assert re.match(
        r"failed: rank 1 of 2 on .* failed after step \d+: "
        r"(it cannot be reached: its process or its node|its node died)",
        last,
    ), last


def is_worker_raylet(pid: int) -> bool:
    """Whether a process is the raylet of a node that is not the head."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[0].endswith(b"/raylet") and b"--head" not in words
