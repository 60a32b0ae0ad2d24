"""Joins the Ray cluster that the environment names, or starts a private one on this machine.

RAY_ADDRESS (which `ray job submit` sets) says which cluster to join; without it a private cluster
starts here, on this machine only and without token authentication, unless RAY_AUTH_MODE says
otherwise: `ray.init` would turn it on by itself and write a token into the home directory. Its
workers run at normal priority, unless RAY_worker_niceness says otherwise: Ray's default of 15 lets
every other process push a rank off its core, while all other ranks wait for it. Only what was
started here is shut down here. A dead address is found by a plain connection first, because
`ray.init` takes minutes to say so.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from rayrec.driver import reaper
from rayrec.driver.head import SOON_S, head
from rayrec.errors import ClusterError, ConfigError, RunInterrupted
from rayrec.storage import one_line

CONNECT_TIMEOUT_S = 10.0
# an autoscaler reports its first status about a second after the head starts
STATUS_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A connection to Ray.

    Attributes:
        private: it was started by this process and ends with it.
        fixed: it does not grow by itself, so what does not fit now will only fit when somebody adds
            nodes.
    """

    private: bool
    fixed: bool


@contextmanager
def connected(num_cpus: int | None = None, address: str = "") -> Iterator[Cluster]:
    """Be connected to Ray inside the block.

    Args:
        num_cpus: CPUs to claim when a private cluster starts; None takes those of the machine.
        address: address of the cluster, in place of RAY_ADDRESS; "auto" finds a local one.
    Raises:
        ConfigError: nothing answers at the address, or this process has joined another cluster, or
            Ray does not start with what it is told.
        ClusterError: Ray does not start for another reason, such as a machine that is busy.
        RunInterrupted: SIGTERM came while Ray started.
    """
    import ray

    # Only a block that connected disconnects; it leaves a connection that it found.
    if ray.is_initialized():
        _check_joined(address)
        head.begin(ray.get_runtime_context().gcs_address)
        yield _describe()
        return
    named = f"the address {address}"
    if not address:
        address = os.environ.get("RAY_ADDRESS", "")
        named = f"RAY_ADDRESS={address}"
    with ExitStack() as stack:
        try:
            if address and address != "local":
                # `ray.init` would try a dead address for minutes.
                _check_reachable(address, named)
                _join(_without_scheme(address))
            else:
                stack.enter_context(reaped(reaper.files_of(os.getpid())))
                _start(num_cpus)
            stack.callback(_leave)
            head.begin(ray.get_runtime_context().gcs_address)
            cluster = _describe()
        except SystemExit as error:
            # `ray.init` takes SIGTERM for itself, and ends with the number of the signal
            if error.code == signal.SIGTERM:
                raise RunInterrupted(signal.SIGTERM) from error
            raise
        yield cluster


def _leave() -> None:
    """Leave a joined cluster, or end a private one."""
    import ray

    head.settle()
    if head.silent_s < SOON_S or head.is_gone:
        ray.shutdown()
    else:
        # a shutdown would wait for the head and hold up every thread meanwhile; the connection
        # ends with the process
        atexit.unregister(ray.shutdown)


@contextmanager
def reaped(files: str) -> Iterator[None]:
    """Have what this process starts in the block ended, however this process ends; see `reaper`.

    Args:
        files: a pattern of the files that these processes write to, and no others.
    """
    command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), files]
    # The process reads its stdin, which closes however this process ends. A session of its own
    # keeps Ctrl-C from it.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=True, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        # something listens there, and is no head that answers
        busy = isinstance(error, ConnectionError) and address != "auto"
        raise (ClusterError if busy else ConfigError)(
            f"cannot join the Ray cluster at {address}: {first} Start a cluster "
            "with `ray start --head`, correct RAY_ADDRESS, or unset it to run on this machine "
            "alone."
        ) from error


def _start(num_cpus: int | None) -> None:
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=True,
            logging_level="WARNING",
        )
    # Ray raises what it meets: paths too long, no shared memory, its own time-outs
    except Exception as error:
        asked = isinstance(error, ValueError) or "AF_UNIX" in str(error)
        raise (ConfigError if asked else ClusterError)(
            f"Ray does not start on this machine: {type(error).__name__}: {one_line(error)}. Mend "
            "that, join a cluster by RAY_ADDRESS, or train one rank without Ray (num_workers=0, "
            "--local)." + ("" if asked else " Where the machine is only busy, try again.")
        ) from error


def _check_joined(address: str) -> None:
    """Check that the cluster that this process has joined is the one that is named.

    Raises:
        ConfigError: it is another.
    """
    import ray

    own = ray.get_runtime_context().gcs_address
    if address not in ("", "auto") and not _is_same(_without_scheme(address), own):
        raise ConfigError(
            f"this process has joined the Ray cluster at {own}, and the address is {address}; "
            "leave the address out, or call ray.shutdown() first."
        )


def _is_same(one: str, other: str) -> bool:
    """Return True if two host:port addresses mean the same socket, also by other host names."""
    hosts: list[str] = []
    ports: list[str] = []
    for address in (one, other):
        host, _, port = address.rpartition(":")
        # a name that nothing resolves, and an address of version 6, are compared as they stand
        with suppress(OSError):
            host = socket.gethostbyname(host.strip("[]"))
        hosts.append(host)
        ports.append(port)
    # a head of this host is at its loopback address too
    return ports[0] == ports[1] and (
        hosts[0] == hosts[1] or any(host.startswith("127.") for host in hosts)
    )


def _check_reachable(address: str, named: str) -> None:
    # for "auto" Ray finds the file that `ray start` wrote, and says at once when there is none
    if address == "auto":
        return
    if address.startswith("ray://"):
        raise ConfigError(
            f"{named} is a Ray Client address; the driver must run inside the "
            "cluster. Use `ray job submit -- python -m jobs.NAME`, or RAY_ADDRESS=host:port of the "
            "head."
        )
    host, _, port = _without_scheme(address).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{named}: nothing answers there ({error}). Start a cluster with `ray "
            "start --head`, correct the address, or unset RAY_ADDRESS to run on this machine alone."
        ) from None


def _without_scheme(address: str) -> str:
    return address.removeprefix("gcs://")


def _describe() -> Cluster:
    import ray._private.worker as worker

    # the head was started here, by a `ray.init` without address
    node = getattr(worker, "_global_node", None)
    private = node is not None and node.is_head()
    return Cluster(private=private, fixed=private or not _grows())


def _grows() -> bool:
    """Return True if the joined cluster has an autoscaler that can add nodes.

    Every head runs a monitor. Without a cluster file, it reports each node under a type that is
    made up from the node's id.
    """
    import ray._private.state as state
    from ray.experimental.internal_kv import _internal_kv_get

    deadline = time.monotonic() + STATUS_S
    while True:
        # Kubernetes, and the second version of Ray's autoscaler
        if state.state.get_cluster_config() is not None:
            return True
        text = _internal_kv_get("__autoscaling_status")
        if text:
            report = json.loads(text).get("autoscaler_report") or {}
            types = report.get("node_type_mapping") or {}
            return not types or any(kind != f"node_{node}" for node, kind in types.items())
        # A head that says nothing may grow: waiting is the smaller mistake.
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
