"""`ray up` of cluster.yaml with nodes of this machine in place of AWS's: the head starts by the
file's own commands, its autoscaler brings a CPU node for a job, and takes it back.

What AWS, Docker and pip would do is left out: provider, node_config, docker and the installation.
`ray stop` and `ray down` are, too, since they end every Ray process of the user.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rayrec.chaos.cluster import head_ports
from tests.leftovers import processes_with
from tests.ray.heads import BIN, ROOT

pytestmark = pytest.mark.slow


def local(cluster: dict[str, Any], folder: Path, ports: dict[str, int]) -> dict[str, Any]:
    """cluster.yaml for nodes of this machine."""
    for node in cluster["available_node_types"].values():
        node.pop("docker", None)
        node.pop("worker_setup_commands", None)
        node.update(node_config={}, min_workers=0)
    # what Ray fills in by itself for AWS alone
    cluster.update(docker={}, rsync_filter=[], cluster_synced_files=[])
    module = "tests.ray.local_provider.LocalProvider"
    cluster["provider"] = {"type": "external", "module": module, "state": f"{folder}/nodes.json"}
    cluster["idle_timeout_minutes"] = 0.1
    cluster["head_setup_commands"] = cluster["worker_setup_commands"] = []
    ((target, source),) = cluster["file_mounts"].items()
    cluster["file_mounts"] = {f"{folder}{target}": str(ROOT / source)}
    # nodes of one machine get their packages with it
    cluster["rsync_exclude"] += ["tests", "docs", "benchmarks"]
    apart = " ".join(f"{name}={port}" for name, port in ports.items() if name != "--port")
    # A node unpacks the job's package anew, so nodes of one machine need folders of their own.
    every = f"--temp-dir={folder}/$RAYREC_NODE_IP --node-ip-address=$RAYREC_NODE_IP"
    every += " --disable-usage-stats"
    every += " --min-worker-port=0 --max-worker-port=0 --object-store-memory=100000000"
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        # the watcher of AWS's notices, which comes last, has nothing to watch here
        stop, start = cluster[name][:2]
        assert stop == "ray stop"
        start = start.replace("--object-manager-port=8076", every)
        start = start.replace("6379", str(ports["--port"]))
        cluster[name] = [f"{start} {apart}" if name.startswith("head") else start]
    return cluster


@pytest.fixture
def env(private_home: Path) -> Iterator[dict[str, str]]:
    """The environment of everything that belongs to the cluster, which ends with the test."""
    mark = uuid.uuid4().hex
    chosen = {**os.environ, "HOME": str(private_home), "RAYREC_TEST_MARK": mark}
    chosen |= {"PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}"}
    chosen |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_AUTH_MODE": "disabled"}
    yield chosen
    deadline = time.monotonic() + 60
    while left := processes_with(f"RAYREC_TEST_MARK={mark}"):
        assert time.monotonic() < deadline, left
        late = time.monotonic() > deadline - 40
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(1)


def test_the_file_starts_a_cluster_that_grows_for_a_job(
    env: dict[str, str], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    import yaml

    ports = head_ports()
    # Ray's sockets lie in its temporary folder, and their paths may not be long
    with ExitStack() as stack:
        folder = Path(f"/tmp/rr-{uuid.uuid4().hex[:8]}")
        folder.mkdir()
        stack.callback(subprocess.run, ["rm", "-rf", str(folder)], check=True)
        cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
        (folder / "up.yaml").write_text(yaml.safe_dump(local(cluster, folder, ports)))
        up = [str(BIN / "ray"), "up", "--yes", "--no-config-cache", str(folder / "up.yaml")]
        done = subprocess.run(up, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        address = f"http://127.0.0.1:{ports['--dashboard-port']}"
        submit = [str(BIN / "ray"), "job", "submit", "--address", address, "--working-dir", "."]
        submit += ["--", "python", "-m", "jobs.smoke", "--ranks", "1", "--placement-timeout", "120"]
        nodes, log_path, had_node = folder / "nodes.json", tmp_path / "job.log", False
        with log_path.open("w") as out:
            job = subprocess.Popen(submit, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
            deadline = time.monotonic() + 300
            # an idle node goes after 6 s, which may be before the command returns
            while job.poll() is None:
                had_node = had_node or "cpu_readers" in nodes.read_text()
                assert time.monotonic() < deadline, log_path.read_text()[-3000:]
                time.sleep(0.2)
        told = log_path.read_text()
        log = "".join(path.read_text()[-3000:] for path in folder.rglob("monitor.log"))
        assert job.returncode == 0 and "OK" in told, told[-3000:] + log
        assert had_node, "the job's rank had a node of its own"
        deadline = time.monotonic() + 90
        while "cpu_readers" in nodes.read_text():
            assert time.monotonic() < deadline, "an idle node stays"
            time.sleep(0.5)
