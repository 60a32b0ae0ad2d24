"""Clusters as `ray start` makes them, for tests: a head with ports, a temporary folder and a home
of its own, and further nodes.

Such a cluster stands beside any other cluster of this machine. `ray stop` is never called: it ends
every Ray process of the user. Nodes run with --block, and a SIGTERM to that one process ends what
it started.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from rayrec.chaos.cluster import head_ports
from tests.leftovers import processes_with

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent

# a lost node is noticed after seconds, not after a quarter of a minute
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
# Ray's provider knows nodes by ids that it gives them itself.
AUTOSCALING = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": "f" * 51 + "00000",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "5",
}


@dataclass(frozen=True)
class Head:
    """A cluster started by `ray start --head`.

    Attributes:
        address: of its dashboard, which takes jobs.
        gcs: host:port that drivers and nodes join.
        folder: Ray's temporary folder.
        env: environment of everything that belongs to it.
    """

    address: str
    gcs: str
    folder: str
    env: dict[str, str]

    @property
    def mark(self) -> str:
        """The variable that all of its processes were born with."""
        return f"RAYREC_TEST_MARK={self.env['RAYREC_TEST_MARK']}"

    def submit(self, *command: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """`ray job submit --working-dir . -- command`, from the root of the repository."""
        words = [
            str(BIN / "ray"),
            "job",
            "submit",
            "--address",
            self.address,
            "--working-dir",
            ".",
            "--",
            *command,
        ]
        return subprocess.run(
            words, cwd=ROOT, env=self.env, text=True, capture_output=True, timeout=timeout_s
        )

    def exit_code(self, output: str) -> int | None:
        """What the job's own process exited with; the command line gives 1 for any failure."""
        from ray.job_submission import JobSubmissionClient

        (name,) = set(re.findall(r"raysubmit_\w+", output))
        return JobSubmissionClient(self.address).get_job_info(name).driver_exit_code

    def run(
        self, cwd: Path, *command: str, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """A job that joins this cluster, started in a folder of the user's."""
        env = {**self.env, "RAY_ADDRESS": self.gcs, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-m", *command]
        return subprocess.run(
            words, cwd=cwd, env=env, text=True, capture_output=True, timeout=timeout_s
        )


@contextmanager
def started_head(
    home: Path, num_cpus: int, autoscaled: dict[str, Any] | None = None
) -> Iterator[Head]:
    """A head inside the block; nothing of it is left afterwards.

    Args:
        autoscaled: node types of which Ray's autoscaler may start two nodes on this machine.
    """
    mark = uuid.uuid4().hex
    env = {
        **os.environ,
        "HOME": str(home),
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "RAYREC_TEST_MARK": mark,
    }
    env["PATH"] = f"{BIN}:{env['PATH']}"  # jobs run `python` of the head's PATH
    env.pop("RAY_ADDRESS", None)
    ports = head_ports()
    # Ray's sockets lie in its temporary folder, and their paths may not be long
    with tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True) as folder:
        words = [
            str(BIN / "ray"),
            "start",
            "--head",
            "--block",
            f"--num-cpus={num_cpus}",
            "--dashboard-host=127.0.0.1",
        ]
        words += [
            f"--temp-dir={folder}",
            "--disable-usage-stats",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        words += [f"{name}={port}" for name, port in ports.items()]
        more: dict[str, str] = {}
        if autoscaled is not None:
            file = Path(folder, "autoscaler.json")
            file.write_text(json.dumps(_autoscaling(autoscaled, f"127.0.0.1:{ports['--port']}")))
            words += [f"--autoscaling-config={file}", f"--system-config={json.dumps(HEALTH)}"]
            more = {**AUTOSCALING, "PYTHONPATH": str(ROOT)}
        with open(f"{folder}/head.log", "w+") as log:
            process = subprocess.Popen(
                words, env={**env, **more}, stdout=log, stderr=subprocess.STDOUT
            )
            address = f"http://127.0.0.1:{ports['--dashboard-port']}"
            try:
                _wait_for(address, process, Path(log.name))
                yield Head(address, f"127.0.0.1:{ports['--port']}", folder, env)
            finally:
                process.terminate()
                process.wait(30)
    # the agents of a head that was killed look for it as long as Ray lets them
    deadline = time.monotonic() + 60
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, left


def _autoscaling(node_types: dict[str, Any], gcs: str) -> dict[str, Any]:
    """What Ray's autoscaler is told; a node that runs nothing for six seconds goes."""
    head = {"resources": {}, "node_config": {}, "max_workers": 0}
    workers = {
        name: {"node_config": {}, "min_workers": 0, "max_workers": 2, **kind}
        for name, kind in node_types.items()
    }
    lists = "initialization_commands", "setup_commands", "rsync_exclude", "rsync_filter"
    lists += "head_setup_commands", "worker_setup_commands", "cluster_synced_files"
    lists += "head_start_ray_commands", "worker_start_ray_commands"
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    return {
        "cluster_name": "walk",
        "max_workers": 2,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "external",
            "module": provider,
            "gcs_address": gcs,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "docker": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {"ray.head.default": head, **workers},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in lists},
    }


def can_unshare() -> bool:
    """Whether this process may make mount namespaces, which takes root in most places."""
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    )


@contextmanager
def node_with_own_disk(head: Head, hidden: Path) -> Iterator[None]:
    """A second node of one CPU, in a mount namespace where `hidden` is an empty disk of its own.
    Needs root.
    """
    # not those that the dashboard counts already, which are too few for a moment
    known = max(1, len(processes_of_command(head, b"raylet/raylet")))
    where = f"--address={head.gcs} --num-cpus=1 --temp-dir={head.folder}"
    ray = f"exec {BIN}/ray start --block {where} --disable-usage-stats"
    script = f"mount -t tmpfs none {hidden} && {ray} --min-worker-port=0 --max-worker-port=0"
    with open(f"{head.folder}/node.log", "w") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script],
            env=head.env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 60
            while nodes_alive(head) <= known:
                assert time.monotonic() < deadline and process.poll() is None, script
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(30)


def processes_of_command(head: Head, words: bytes) -> set[int]:
    """Processes of a cluster with these words in their command."""
    kept = set()
    for pid in processes_with(head.mark):
        with suppress(OSError):
            if words in Path(f"/proc/{pid}/cmdline").read_bytes():
                kept.add(pid)
    return kept


def nodes_alive(head: Head) -> int:
    """The nodes that the cluster counts now."""
    with urlopen(f"{head.address}/nodes?view=summary", timeout=20) as answer:
        nodes = json.load(answer)["data"]["summary"]
    return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)


def _wait_for(
    address: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 60
) -> None:
    """Until the dashboard answers, which takes jobs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{address}/api/version", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(
        f"no head after {timeout_s} s, exit code {process.poll()}:\n{log.read_text()[-3000:]}"
    )
