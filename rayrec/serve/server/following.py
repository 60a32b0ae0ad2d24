"""`Following`: changes a replica over to new versions that its parent announces."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

from rayrec.serve.chain.follower import Version
from rayrec.serve.server.leading import CHANGED, Lead, ParentMessage
from rayrec.serve.server.metrics import Metrics


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
        metrics.at_version(version.step, version.time)
        metrics.chain_is(self.told.state)
        self._tasks: set[asyncio.Task[None]] = set()
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
        except (EOFError, OSError):  # the parent is gone, which ends this process, too
            self.close()
            return
        assert isinstance(told, ParentMessage)
        self._metrics.chain_is(told.state)
        if told.version is not None:
            task = self._loop.create_task(self._take(told.version))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(self, version: Version) -> None:
        # in a thread of its own: requests go on meanwhile, by the version before
        await asyncio.to_thread(self._change_over, version)
        self._metrics.at_version(version.step, version.time)
        self._connection.send_bytes(CHANGED)

    def _change_over(self, version: Version) -> None:
        """Change over to a version, and wait for the calls of the one before to end."""
        predictor = self._lead.predictor
        predictor.take(self._lead.dense_of(version))
        for copy in range(len(predictor.follower.copies.data)):
            if copy != version.copy:
                predictor.wait_unread(copy)
