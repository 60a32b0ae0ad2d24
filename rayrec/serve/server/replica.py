"""`Replica`: one process that answers, from its first request to its end.

Its event loop reads and writes messages; one more thread scores (`scoring`). At SIGTERM it takes no
more requests, answers those that it has, and ends with code 0.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from rayrec.serve.predictor import Predictor
from rayrec.serve.server.following import Following
from rayrec.serve.server.grpc_service import GrpcService
from rayrec.serve.server.http_service import HttpService
from rayrec.serve.server.leading import Lead
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.scoring import ScoringQueue
from rayrec.serve.server.served import request_columns, served_schema, version_of
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.server.untrusted import RequestReader


class Replica:
    """The two services of one predictor; made inside of a running event loop.

    Args:
        lead, parent: of a predictor that follows, what the parent has made for its replicas, and
            the connection to it.
    Raises:
        ConfigError: the artifact has no schema.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: ServerSettings,
        lead: Lead | None = None,
        parent: Connection | None = None,
    ) -> None:
        schema = served_schema(predictor)
        self.settings = settings
        self.ended = asyncio.Event()
        self.code = 0
        metrics = Metrics(version_of(predictor)[0] if lead is None else None)
        self.queue = ScoringQueue(predictor, settings, metrics, self._fail)
        reader = RequestReader(request_columns(schema), settings.max_rows)
        self.grpc = GrpcService(self.queue, reader, settings, metrics)
        self.http = HttpService(self.queue, reader, settings, metrics)
        self.following: Following | None = None
        if lead is not None and parent is not None:
            self.following = Following(lead, parent, metrics)
            self.http.chain = self.following.says

    async def start(self) -> None:
        """Listen at both ports.

        Raises:
            UnavailableError: an address cannot be had.
        """
        await self.grpc.start()
        await self.http.start()

    async def stop(self) -> None:
        """Take no more requests, answer those that are here, and end the thread."""
        most = self.settings.drain_s
        if self.following is not None:
            self.following.close()
        try:
            async with asyncio.timeout(most):
                await asyncio.gather(self.grpc.stop(most), self.http.stop())
                await self.queue.drain()
        except TimeoutError:
            self.code = 1
        self.queue.close()

    def _fail(self) -> None:
        self.code = 1
        self.ended.set()


def run_replica(
    predictor: Predictor,
    settings: ServerSettings,
    ready: Callable[[], None],
    lead: Lead | None = None,
    parent: Connection | None = None,
) -> int:
    """Answer until SIGTERM or SIGINT; returns the exit code.

    Args:
        ready: called once requests are taken.
        lead, parent: as for `Replica`.
    Raises:
        UnavailableError: an address cannot be had.
    """
    torch.set_num_threads(settings.threads)
    predictor.warm()

    async def answer() -> int:
        replica = Replica(predictor, settings, lead, parent)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, replica.ended.set)
        # signals were blocked until there was somebody to hear them
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        await replica.start()
        ready()
        await replica.ended.wait()
        await replica.stop()
        return replica.code

    return asyncio.run(answer())
