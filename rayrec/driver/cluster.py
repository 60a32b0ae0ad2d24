"""Being connected to Ray: join the cluster that the environment names, or start a private one on this machine, and leave no trace.

RAY_ADDRESS (which `ray job submit` sets) says which cluster to join; without it a private cluster starts here, on this machine only and
without token authentication, unless RAY_AUTH_MODE says otherwise: `ray.init` would turn it on by itself and write a token into the home
directory. Its workers run at normal priority, unless RAY_worker_niceness says otherwise: Ray's default of 15 lets every other process
push a rank off its core, while all other ranks wait for it. Only what was started here is shut down here. A dead address is found by a
plain connection first, because `ray.init` takes minutes to say so.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rayrec.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A connection to Ray.

    Attributes:
        started: it was started here and ends with the connection.
        fixed: it cannot grow, so that what does not fit now never will.
    """

    started: bool
    fixed: bool


@contextmanager
def connected(num_cpus: int | None = None) -> Iterator[Cluster]:
    """Be connected to Ray inside the block.

    Args:
        num_cpus: CPUs to claim when a private cluster starts; None takes those of the machine.
    Raises:
        ConfigError: RAY_ADDRESS names nothing that answers.
    """
    import ray

    if ray.is_initialized():
        yield Cluster(started=False, fixed=_is_head_here())
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address and address != "local":
        _check_reachable(address)
        ray.init(address=address if address == "auto" else _without_scheme(address), log_to_driver=True, logging_level="WARNING")
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=True, logging_level="WARNING")
    try:
        yield Cluster(started=True, fixed=_is_head_here())
    finally:
        ray.shutdown()  # of a joined cluster: disconnects; of a private one: ends it


@contextmanager
def stop_on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM inside the block; after Ray's own handler, which `ray.init` installs, so enter it later than that.

    Signals reach the main thread only; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    before: Any = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _check_reachable(address: str) -> None:
    if address == "auto":
        return  # Ray finds the file that `ray start` wrote, and says at once when there is none
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is a Ray Client address; the driver must run inside the cluster. "
            "Use `ray job submit -- python -m jobs.NAME`, or RAY_ADDRESS=host:port of the head."
        )
    host, _, port = _without_scheme(address).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: nothing answers there ({error}). Start a cluster with `ray start --head`, correct the address, "
            "or unset RAY_ADDRESS to run on this machine alone."
        ) from None


def _without_scheme(address: str) -> str:
    return address.removeprefix("gcs://")


def _is_head_here() -> bool:
    """Whether this process started the head, which a `ray.init` without address does: such a cluster has no autoscaler."""
    import ray._private.worker as worker

    node = getattr(worker, "_global_node", None)
    return bool(node is not None and node.is_head())
