"""`Lead` and `Following`: all replicas of a parent go from version to version of a chain together.

The parent alone reads the folder. It writes a version into the copy of the tables that nobody
reads, tells the replicas, and looks for the next one when all of them have changed over. They share
both copies, so a version is applied once for any number of replicas. The dense part passes through
a file in memory, which they have inherited, so that the parent never waits for one of them, and no
disk that is full cuts it off.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from rayrec.serve.chain.follower import Version
from rayrec.serve.chain.following import FollowingPredictor
from rayrec.serve.server.telling import say, tell

if TYPE_CHECKING:
    # a parent may not import prometheus_client, which forked replicas do themselves
    from rayrec.serve.server.metrics import Metrics

# messages of a replica that has changed over, and of one that hangs at it or cannot
CHANGED, LATE = b"changed", b"late"
_LATE_S = 60.0  # a replica that has not changed over by then hangs


@dataclass(frozen=True, slots=True)
class ParentMessage:
    """Message of the parent to a replica.

    Attributes:
        state: state of the chain; the value of a `Verdict`.
        trouble: reason why the newest publication is not served, or "".
        version: version to change over to, without its dense part, or None.
    """

    state: str
    trouble: str
    version: Version | None


class DenseFile:
    """File in memory that replicas inherit, for the dense part of a version."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("rayrec-dense"), "r+b", buffering=0)  # noqa: SIM115

    def write(self, content: bytes) -> None:
        """Write a dense part in place of the one before."""
        file, rest = self._file.fileno(), memoryview(content)
        os.ftruncate(file, 0)
        while rest:
            # one call writes 2 GiB at most
            rest = rest[os.pwrite(file, rest, len(content) - len(rest)) :]

    def read(self) -> bytes:
        """Read the dense part."""
        # one call of read would give 2 GiB at most
        with mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ) as content:
            return content[:]


class Lead:
    """Leader of replicas that follow a chain, in their parent.

    Args:
        predictor: predictor that the replicas inherit by the fork.
        poll_s: seconds between two looks at the folder.
    """

    def __init__(self, predictor: FollowingPredictor, poll_s: float) -> None:
        self.predictor, self._poll_s = predictor, poll_s
        self._dense = [DenseFile() for _ in range(2)]
        self._next = time.monotonic() + poll_s
        # replicas that have not changed over yet
        self._waited: set[int] = set()
        self._told = self.told(None)

    def told(self, version: Version | None) -> ParentMessage:
        """Return the message for the replicas: the state of the chain, and a version if given."""
        one = self.predictor
        return ParentMessage(one.verdict.value, one.trouble, version)

    def dense_of(self, version: Version) -> Version:
        """Return a version with its dense part; called on a replica."""
        return replace(version, dense=self._dense[version.copy].read())

    def timeout(self) -> float:
        """Return the seconds until `turn` has something to do."""
        # no version comes before all have changed over, each of which wakes the supervisor
        return math.inf if self._waited else max(0.0, self._next - time.monotonic())

    def heard(self, replica: int) -> None:
        """Record that a replica has changed over, or is gone."""
        self._waited.discard(replica)

    def turn(self, replicas: Mapping[int, Connection]) -> None:
        """Apply the next publication and tell the replicas, if that is due and all are ready."""
        if self.timeout() > 0:
            return
        version = self.predictor.follower.look()
        self._next = time.monotonic() + (self._poll_s if version is None else 0.0)
        if version is not None:
            self._change_over(version)
        told = self.told(None if version is None else replace(version, dense=b""))
        if told == self._told:
            return
        if told.trouble and told.trouble != self._told.trouble:
            say(f"{told.state}: {told.trouble}")
        self._told = replace(told, version=None)
        for number, connection in replicas.items():
            if version is not None:
                self._waited.add(number)
            with suppress(OSError):  # the replica died, which the supervisor notices
                connection.send(told)

    def _change_over(self, version: Version) -> None:
        """Change this process over to a version, which later replicas inherit."""
        self.predictor.take(version)
        self._dense[version.copy].write(version.dense)
        tell(f"now at step {version.step}, version {version.name}")


class Following:
    """Receiver of the parent's messages in a replica; made inside of a running event loop.

    Args:
        lead: lead of the parent, inherited by the fork.
        connection: connection to the parent.
        metrics: metrics of the replica.
    Attributes:
        told: last message of the parent.
    """

    def __init__(self, lead: Lead, connection: Connection, metrics: Metrics) -> None:
        self._lead, self._connection, self._metrics = lead, connection, metrics
        self._loop = asyncio.get_running_loop()
        self.told = lead.told(None)
        version = lead.predictor.follower.version
        metrics.at_version(version)
        metrics.chain_is(self.told.state)
        self._taking: asyncio.Task[None] | None = None
        self._loop.add_reader(connection.fileno(), self._read)

    def says(self) -> dict[str, str]:
        """Return the verdict on the newest publication, for health checks."""
        return {"chain": self.told.state, "trouble": self.told.trouble}

    def close(self) -> None:
        """Stop listening to the parent."""
        self._loop.remove_reader(self._connection.fileno())

    def _read(self) -> None:
        try:
            self.told = told = self._connection.recv()
        except (EOFError, ConnectionError):  # the parent is gone, which ends this process, too
            self.close()
            return
        except Exception:
            # others wait until it has changed over to what it was told, which is lost
            self.close()
            self._connection.send_bytes(LATE)
            raise
        assert isinstance(told, ParentMessage)
        self._metrics.chain_is(told.state)
        if told.version is not None:
            # the one before has changed over, or the parent would not send another
            self._taking = self._loop.create_task(self._take(told.version))

    async def _take(self, version: Version) -> None:
        late = self._loop.call_later(_LATE_S, self._connection.send_bytes, LATE)
        try:
            # in a thread of its own: requests go on meanwhile, by the version before
            await asyncio.to_thread(self._change_over, version)
            self._metrics.at_version(version)
            self._connection.send_bytes(CHANGED)
        except Exception:
            self._connection.send_bytes(LATE)
            raise
        finally:
            late.cancel()
            self._taking = None  # the event loop tells the error of a task that nobody holds

    def _change_over(self, version: Version) -> None:
        """Change over to a version, and wait for the calls of the one before to end."""
        predictor = self._lead.predictor
        predictor.take(self._lead.dense_of(version))
        for copy in range(len(predictor.follower.copies.data)):
            if copy != version.copy:
                predictor.wait_unread(copy)
