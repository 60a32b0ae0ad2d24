"""`ray start --head` and `ray job submit --working-dir .` as a user types them: success, and what is told when the job fails.

The head has ports, a temporary folder and a home of its own, so that it stands beside any other cluster of this machine. `ray stop` is
never called: it ends every Ray process of the user. The head runs with --block, and a SIGTERM to that one process ends what it started.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data.synthetic import SyntheticPaths
from tests.leftovers import processes_with

pytestmark = pytest.mark.slow
ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
PORTS = (
    *("--port", "--dashboard-port", "--dashboard-agent-listen-port", "--dashboard-agent-grpc-port", "--ray-client-server-port"),
    *("--metrics-export-port", "--runtime-env-agent-port", "--node-manager-port", "--object-manager-port"),
)


@dataclass(frozen=True)
class Head:
    """A cluster started by `ray start --head`."""

    address: str
    env: dict[str, str]

    def submit(self, *command: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """`ray job submit --working-dir . -- command`, from the root of the repository."""
        words = [str(BIN / "ray"), "job", "submit", "--address", self.address, "--working-dir", ".", "--", *command]
        return subprocess.run(words, cwd=ROOT, env=self.env, text=True, capture_output=True, timeout=timeout_s)

    def exit_code(self, output: str) -> int | None:
        """What the job's own process exited with; the command line gives 1 for any failure."""
        from ray.job_submission import JobSubmissionClient

        (name,) = set(re.findall(r"raysubmit_\w+", output))
        return JobSubmissionClient(self.address).get_job_info(name).driver_exit_code


@pytest.fixture(scope="module")
def head(private_home: Path) -> Iterator[Head]:
    mark = uuid.uuid4().hex
    env = {**os.environ, "HOME": str(private_home), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAYREC_TEST_MARK": mark}
    env["PATH"] = f"{BIN}:{env['PATH']}"  # jobs run `python` of the head's PATH
    env.pop("RAY_ADDRESS", None)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
        ports = dict(zip(PORTS, (s.getsockname()[1] for s in sockets), strict=True))
    # Ray's sockets lie in its temporary folder, and their paths may not be long
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as folder:
        words = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=3", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
        words += [f"--temp-dir={folder}", "--min-worker-port=0", "--max-worker-port=0", *(f"{name}={port}" for name, port in ports.items())]
        with open(f"{folder}/head.log", "w+") as log:
            process = subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
            address = f"http://127.0.0.1:{ports['--dashboard-port']}"
            try:
                wait_for(address, process, Path(log.name))
                yield Head(address, env)
            finally:
                process.terminate()
                process.wait(30)
    deadline = time.monotonic() + 20
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, left


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 60) -> None:
    """Until the dashboard answers, which takes jobs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{address}/api/version", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"no head after {timeout_s} s, exit code {process.poll()}:\n{log.read_text()[-3000:]}")


def test_a_submitted_job_trains(head: Head, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    data = ("--rows", "30000", "--eval-rows", "3000", "--global-batch", "512")
    done = head.submit("python", "-m", "jobs.train_dlrm", "--ranks", "2", "--steps", "50", *data, "--result", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: step 50, 25600 rows" in done.stdout and "bayes_auc" in done.stdout and "succeeded" in done.stdout + done.stderr
    assert result.is_file() and head.exit_code(done.stdout + done.stderr) == 0


def test_a_rank_that_fails_is_the_cause_that_the_submitter_reads(head: Head, clicks: SyntheticPaths, tmp_path: Path) -> None:
    source = next(clicks.train.glob("*.parquet"))
    table = pq.read_table(source)
    place = table.column_names.index("cat_0")
    ids = table["cat_0"].to_pylist()
    ids[4321] = 123456
    (tmp_path / "train").mkdir()
    pq.write_table(table.set_column(place, "cat_0", pa.array(ids, pa.int32())), tmp_path / "train" / "part-bad.parquet")
    done = head.submit("python", "-m", "jobs.train_dlrm", "--ranks", "2", "--train", f"{tmp_path}/train", "--schema", str(clicks.schema))
    told = done.stdout + done.stderr
    assert done.returncode == 1 and head.exit_code(told) == 1
    assert re.search(r"failed: .*rank [01] of 2.*'cat_0'.*id 123456 in row 4321 of '.*part-bad", told), told


def test_a_mistake_is_told_in_one_line_before_anything_starts(head: Head) -> None:
    done = head.submit("python", "-m", "jobs.train_dlrm", "--ranks", "2", "--plan", "rowwise", "--rows", "1000", "--eval-rows", "100")
    told = done.stdout + done.stderr
    assert done.returncode == 1 and head.exit_code(told) == 2
    assert "error: plan 'rowwise' is neither a file nor one of: auto" in told


def test_more_ranks_than_the_cluster_has_cpus_is_refused_with_numbers(head: Head) -> None:
    words = ("--ranks", "5", "--rows", "1000", "--eval-rows", "100", "--placement-timeout", "8")
    done = head.submit("python", "-m", "jobs.train_dlrm", *words)
    told = done.stdout + done.stderr
    assert done.returncode == 1 and head.exit_code(told) == 2
    assert re.search(r"error: .*5 ranks.*CPU", told), told
