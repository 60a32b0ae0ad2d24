"""`Following`: a replica that is told of new versions changes over to them, between two calls."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

from rayrec.serve.chain.follower import Version
from rayrec.serve.server.leading import CHANGED, Lead, ParentMessage
from rayrec.serve.server.metrics import Metrics


class Following:
    """What a replica does with what it is told; made inside of a running event loop.

    Args:
        lead: of the parent, as it was inherited.
        connection: to the parent.
        metrics: of the replica.
    Attributes:
        told: what was told last.
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
        """What the newest publication is to this server."""
        return {"chain": self.told.state, "trouble": self.told.trouble}

    def close(self) -> None:
        """Listen no more."""
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
        """Take a version, and see the calls of the one before end."""
        predictor = self._lead.predictor
        predictor.take(self._lead.dense_of(version))
        for copy in range(len(predictor.follower.copies.data)):
            if copy != version.copy:
                predictor.wait_unread(copy)
