"""Asks the head of the Ray cluster aside, so that no run stands still while it does not answer.

Ray's calls about nodes, places and resources wait for the head without a bound, and ranks train and
fail meanwhile. One thread makes these calls, in their order. The loop of a run takes the answers
that came; who needs a new one waits for it and is told several times a second to look at
signals. There is one head for a process, as there is one connection to Ray. A call costs two
switches of threads. The functions below ask what a run wants to know of resources, nodes and
placement groups; each waits for the head without a bound, so it is called by `head` alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from rayrec.driver.views import Resources
from rayrec.errors import ClusterError
from rayrec.storage import one_line
from rayrec.train.seat import RankAddress

T = TypeVar("T")
Task = tuple[Callable[[], Any], Future[Any]]

# a head that is well answers in a few milliseconds
SOON_S = 0.25
# silence that is told
SILENT_S = 5.0
# silence that ends a wait for an answer
LIMIT_S = 600.0
# from one question to the next where nobody else asks
BEAT_S = 1.0
PROBE_S = 1.0
# for so long Ray tries to reach a head that is gone, and ends the process then, with code 1 and
# without a word of ours
RECONNECT, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60
# time left of these for the silence before it is told, and `ray.shutdown`: 12 s without a head
LEAVE_S = 30.0
# at the end of a run, for what it gives back
END_S = 5.0


class Head:
    """Queries of this process to the cluster's head, answered on a thread of their own.

    Attributes:
        address: host:port of the head; "" where it is not known, or not of interest.
    """

    address = ""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.begin()

    def begin(self, address: str = "") -> None:
        """Forget what an earlier connection was told, and what it still waits for."""
        self.address = address
        self._tasks.put(None)
        self._tasks = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open: dict[object, Future[Any]] = {}
        # since when the thread waits for an answer; when that was told
        self._since: float | None = None
        self._told: float | None = None
        self._beat_at = self._refused_since = 0.0

    def aside(self, do: Callable[[], T]) -> Future[T]:
        """Have something done that asks the head; returns soon, mostly after it was done."""
        future: Future[T] = Future()
        self._tasks.put((do, future))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._tasks,), name="rayrec-head", daemon=True
            )
            self._thread.start()
        if self.silent_s < SOON_S:
            wait([future], SOON_S)
        return future

    def news(self, name: object, ask: Callable[[], T]) -> T | None:
        """Send a repeated query, unless it is under way; return its answer once it has come.

        Args:
            name: key of the query.
        Raises:
            whatever `ask` raises.
        """
        if name not in self._open:
            self._open[name] = self.aside(ask)
        found: T | None = None
        if self._open[name].done():
            with suppress(*lost_calls()):
                found = self._open.pop(name).result()
        return found

    def answer(self, ask: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
        """Wait for the answer to a question.

        Args:
            check: called several times a second meanwhile; its error ends the wait.
        Raises:
            ClusterError: there was none for `LIMIT_S` seconds, or the call was lost.
            whatever `ask` raises.
        """
        future = self.aside(ask)
        deadline = time.monotonic() + LIMIT_S
        while not future.done():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the head of the Ray cluster has not answered for {LIMIT_S:.0f} s; see "
                    "whether its machine is overloaded, and begin again."
                )
            check()
            wait([future], SOON_S)
        try:
            return future.result()
        except lost_calls() as error:
            raise ClusterError(
                f"the head of the Ray cluster does not answer: {one_line(error)}. Begin again."
            ) from error

    def settle(self) -> None:
        """Wait until all is done that was asked for, unless the head does not answer."""
        # on a busy machine a head that is well takes longer than it mostly does
        if self.silent_s < SILENT_S:
            wait([self.aside(lambda: None)], END_S)

    @property
    def is_gone(self) -> bool:
        """True if nothing listens at the head's address any more."""
        if not self.address:
            return False
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S):
                return False
        except OSError:
            return True

    @property
    def silent_s(self) -> float:
        """For how long the head has owed an answer."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def look(self, say: Callable[[str], None]) -> None:
        """Probe the head about once a second, and report when it falls silent or answers again.

        Raises:
            ClusterError: nothing listens at its address any more.
        """
        now = time.monotonic()
        if now - self._beat_at < BEAT_S:
            return
        self._beat_at = now
        if self.address:
            self.news("nodes that live", alive_nodes)
        silent_s = self.silent_s
        if self._told is not None and self._since != self._told:
            told, self._told = self._told, None
            say(f"the driver hears from Ray again, after {now - told:.0f} s")
        elif silent_s >= SILENT_S:
            if self._told is None:
                self._told, self._refused_since = self._since, 0.0
                say(
                    f"the driver does not hear from Ray: the cluster's head has not answered for "
                    f"{silent_s:.0f} s; the ranks go on meanwhile, and are watched"
                )
            self._probe()

    def _probe(self) -> None:
        if not self.is_gone:
            self._refused_since = 0.0
            return
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        rays_s = float(os.environ.get(RECONNECT, RECONNECT_S))
        limit_s = max(rays_s / 4, rays_s - LEAVE_S)
        if now - self._refused_since >= limit_s:
            raise ClusterError(
                f"the head of the Ray cluster at {self.address} is gone: nothing has listened "
                f"there for {limit_s:.0f} s. Start the run again once there is a cluster; with "
                "resume_from='auto' it goes on from its newest checkpoint."
            )

    def _work(self, tasks: SimpleQueue[Task | None]) -> None:
        while (task := tasks.get()) is not None:
            do, future = task
            # a query that fails for want of an answer ends no silence
            since = self._since or time.monotonic()
            if tasks is self._tasks:
                self._since = since
            try:
                result, error = do(), None
            except BaseException as raised:
                result, error = None, raised
            if tasks is self._tasks and not isinstance(error, lost_calls()):
                self._since = None
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def lost_calls() -> tuple[type[Exception], ...]:
    """Return Ray's error classes for a call to the head that was lost or timed out."""
    from ray.exceptions import GetTimeoutError, RpcError

    return RpcError, GetTimeoutError


head = Head()


def resources() -> Resources:
    """Return the total and the free resources of the cluster."""
    import ray
    from ray._private.state import available_resources_per_node

    return Resources(ray.cluster_resources(), tuple(available_resources_per_node().values()))


def alive_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are alive."""
    import ray

    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def worker_of(actor_id: str) -> RankAddress | None:
    """Return the process that Ray has chosen for an actor, or None before it has."""
    from ray._private.state import actors

    found = actors(actor_id)
    where, pid = found.get("Address", {}), found.get("Pid", 0)
    if not pid or not where.get("NodeID"):
        return None
    return RankAddress(node_id=where["NodeID"], host=where["IPAddress"], pid=pid)


def draining() -> dict[str, float | None]:
    """Return the draining nodes: deadline in wall clock seconds, or None if unknown, by node id."""
    import ray._private.state as state

    ends: Mapping[str, int] = state.state.get_draining_nodes()
    return {node: at_ms / 1000 if at_ms else None for node, at_ms in ends.items()}


def bundles(group: Any) -> tuple[str, dict[int, str]]:
    """Return Ray's word for the state of a placement group, and the node of each given bundle."""
    from ray.util.placement_group import placement_group_table

    table = placement_group_table(group)
    state = table.get("state", "unknown")
    said = str(table.get("stats", {}).get("scheduling_state", state))
    # A pending group has no place yet; one that lost a node keeps its other places.
    if state not in ("CREATED", "RESCHEDULING"):
        return said, {}
    nodes = table.get("bundles_to_node_id", {})
    return said, {int(bundle): str(node) for bundle, node in nodes.items()}
