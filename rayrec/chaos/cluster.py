"""`PrivateCluster`: a Ray head of this command's own, and perhaps a second node.

Home, temporary files and all that its processes print lie below one new folder, which is removed at
the end. The files below it also tell which processes are the cluster's, so that no process of
another cluster, or of anything else, is ever struck. `ray stop` is not used: it ends every Ray
process of the user.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rayrec.chaos.job import Job
from rayrec.driver import reaper
from rayrec.driver.cluster import reaped
from rayrec.errors import ClusterError, RayrecError
from rayrec.train.progress import SHOWN_IN

PORTS = (
    "--port",
    "--dashboard-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--ray-client-server-port",
    "--metrics-export-port",
    "--runtime-env-agent-port",
    "--node-manager-port",
    "--object-manager-port",
)
# Linux gives connections the ports from 32768 on, and Ray's workers have some below 20000.
LOWEST_PORT, HIGHEST_PORT = 20000, 32767
# a lost node is noticed in some seconds, not in Ray's fourteen
HEALTH = (
    '{"health_check_initial_delay_ms":0,"health_check_period_ms":1000,'
    '"health_check_timeout_ms":2000,"health_check_failure_threshold":3}'
)
START_S = 240.0
STARTS = 3  # a port that was free can be taken before Ray has it
RANK = b"ray::RankActor"


class PrivateCluster:
    """Private Ray cluster on this machine, made by `private_cluster`.

    Args:
        folder: new and empty; its name is short, since the paths of sockets are bounded.
        nodes: 1, or 2 for one that can be lost.
    """

    def __init__(self, folder: Path, cpus: float, nodes: int) -> None:
        self.folder, self.nodes, self._cpus = folder, nodes, cpus
        self._files = f"^{re.escape(str(folder))}/"
        self._head: subprocess.Popen[bytes] | None = None
        self._other: subprocess.Popen[bytes] | None = None
        self.shown = folder / "shown"
        for name in ("home", "tmp", "shown"):
            (folder / name).mkdir()
        self.env = {
            **os.environ,
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "RAY_AUTH_MODE": "disabled",
            SHOWN_IN: str(self.shown),
        }
        # Ray's 15 lets every other process push a rank off its core.
        self.env.setdefault("RAY_worker_niceness", "0")
        self.env.pop("RAY_ADDRESS", None)

    def start(self) -> None:
        """Start all nodes, and wait until they are up.

        Raises:
            ClusterError: Ray does not start; with its last line.
        """
        words = ["--head", "--include-dashboard=false", "--dashboard-host=127.0.0.1"]
        if self.nodes > 1:
            words.append(f"--system-config={HEALTH}")
        deadline = time.monotonic() + START_S
        for attempt in range(STARTS):
            ports = head_ports()
            options = [f"{name}={port}" for name, port in ports.items()]
            try:
                self._head = self._start("head", [*words, *options], deadline)
                break
            except ClusterError:
                if attempt == STARTS - 1 or time.monotonic() > deadline:
                    raise
        self.env["RAY_ADDRESS"] = f"127.0.0.1:{ports['--port']}"
        self.fill()

    def fill(self) -> None:
        """Start the second node where it is wanted and there is none."""
        if self.nodes > 1 and (self._other is None or self._other.poll() is not None):
            words = [f"--address={self.env['RAY_ADDRESS']}"]
            self._other = self._start("node", words, time.monotonic() + START_S)

    def ranks(self) -> list[int]:
        """Return the processes of running ranks in the order of their start, not frozen ones."""
        ranks = []
        for pid in reaper.members(self._files, os.getpid()):
            with suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if title.startswith(RANK) and state not in "TtZX":
                    ranks.append(pid)
        return sorted(ranks)

    def signal_gcs(self, number: signal.Signals) -> tuple[int, ...]:
        """Send a signal to Ray's control service, and return its process; none if it is gone."""
        for pid in reaper.members(self._files, os.getpid()):
            with suppress(OSError):
                if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                    os.kill(pid, number)
                    return (pid,)
        return ()

    def lose_node(self) -> int | None:
        """Kill all processes of the second node at once, and return the first one's id, or None."""
        node = self._other
        if node is None or node.poll() is not None:
            return None
        parents = _parents()
        lost = {node.pid}
        # children come after their parents: until no more is found, whatever their numbers are
        while more := {pid for pid, parent in parents.items() if parent in lost} - lost:
            lost |= more
        for pid in lost:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        return node.pid

    def end(self) -> None:
        """End all processes that the cluster and its jobs have started."""
        for process in (self._other, self._head):
            if process is not None and process.poll() is None:
                process.terminate()
        for process in (self._other, self._head):
            if process is not None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
        for pid in reaper.members(self._files, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, words: list[str], deadline: float) -> subprocess.Popen[bytes]:
        cpus = f"{self._cpus:g}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words]
        command += [f"--num-cpus={cpus}", f"--temp-dir={self.folder}/ray", "--disable-usage-stats"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            # a session of its own keeps Ctrl-C from it
            process = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while b"Ray runtime started" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                said = log.read_text(errors="replace").split()
                raise ClusterError(
                    f"Ray does not start on this machine in {START_S:.0f} s: "
                    f"{' '.join(said[-30:]) or 'it says nothing'}"
                )
            time.sleep(0.1)
        return process


@contextmanager
def private_cluster(job: Job, nodes: int) -> Iterator[PrivateCluster]:
    """Run a cluster with room for a job inside the block; nothing of it is left.

    Args:
        nodes: 1, or 2 of which each holds half of the ranks, and of the spares.
    Raises:
        ClusterError: Ray does not start.
    """
    cpus = max(1.0, (-(-job.ranks // nodes) + -(-job.spares // nodes)) * job.cpus)
    # the paths of Ray's sockets have room for 107 bytes
    with tempfile.TemporaryDirectory(prefix="rc-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        with reaped(f"^{re.escape(str(folder))}/"):
            cluster = PrivateCluster(folder, cpus, nodes)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.end()


def head_ports() -> dict[str, int]:
    """Return a free port for every option of `ray start --head` that takes one.

    A port that the system itself finds free would be no better than these: it comes out of the
    range from which every new connection of this machine takes one, until Ray has bound it.

    Raises:
        RayrecError: this machine has too few free ports.
    """
    candidates = range(LOWEST_PORT, HIGHEST_PORT + 1)
    ports: dict[str, int] = {}
    with ExitStack() as stack:
        for number in random.SystemRandom().sample(candidates, len(candidates)):
            with suppress(OSError):  # something has it
                stack.enter_context(socket.create_server(("127.0.0.1", number)))
                ports[PORTS[len(ports)]] = number
            if len(ports) == len(PORTS):
                return ports
    raise RayrecError(
        f"127.0.0.1 has {len(ports)} free ports from {LOWEST_PORT} to {HIGHEST_PORT}, and Ray "
        f"needs {len(PORTS)}; end what holds them."
    )


def _parents() -> dict[int, int]:
    """Return the parent of every process of this machine."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    return parents
