"""`Replica`: one process that answers, from its first request to its end.

Its event loop takes and sends messages; one more thread reads large ones (`reading_thread`), and
one scores (`scoring_queue`). At SIGTERM it says that it is not ready, answers as before for a
while, in which proxies and clients turn to others, takes no more requests then, answers those that
it has, and ends with code 0.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection

import torch

from rayrec.serve.predictor import Predictor
from rayrec.serve.server.answering import Answering
from rayrec.serve.server.complaints import Complaints
from rayrec.serve.server.following import Following
from rayrec.serve.server.grpc_service import GrpcService
from rayrec.serve.server.health import Health
from rayrec.serve.server.http_service import HttpService
from rayrec.serve.server.leading import Lead
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.settings import ServerSettings


class Replica:
    """The two services of one predictor; made inside of a running event loop.

    Args:
        lead, parent: lead of the parent process, and the connection to it, for a predictor that
            follows a chain.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: ServerSettings,
        lead: Lead | None = None,
        parent: Connection | None = None,
    ) -> None:
        self.settings = settings
        self.ended = asyncio.Event()
        self.code = 0
        metrics = Metrics(predictor.weights.name if lead is None else None)
        self.answering = Answering(predictor, settings, metrics, self._fail)
        self.health = Health()
        shared = self.answering, self.health, settings
        self.grpc, self.http = GrpcService(*shared), HttpService(*shared)
        self.following: Following | None = None
        if lead is not None and parent is not None:
            self.following = Following(lead, parent, metrics)
            self.http.chain = self.following.says

    async def start(self) -> None:
        """Start to listen at both ports.

        Raises:
            UnavailableError: an address cannot be had.
        """
        asyncio.get_running_loop().set_exception_handler(Complaints())
        await self.grpc.start()
        await self.http.start()
        self.health.set_ready(True)

    async def stop(self) -> None:
        """Drain: report not ready, refuse requests, answer pending ones, and end the threads."""
        most = self.settings.drain_s
        self.health.set_ready(False)
        if not self.code:  # after a defect nothing is scored any more
            await asyncio.sleep(self.settings.lame_duck_s)
        if self.following is not None:
            self.following.close()
        try:
            async with asyncio.timeout(most):
                await asyncio.gather(self.grpc.stop(most), self.http.stop())
                await self.answering.queue.drain()
        except TimeoutError:
            self.code = 1
        self.answering.close()

    def _fail(self) -> None:
        self.code = 1
        self.ended.set()


def run_replica(
    predictor: Predictor,
    settings: ServerSettings,
    ready: Callable[[], None],
    pulse: Callable[[], Coroutine[None, None, None]],
    lead: Lead | None = None,
    parent: Connection | None = None,
) -> int:
    """Answer requests until SIGTERM or SIGINT, and return the exit code.

    Args:
        ready: called once requests are taken.
        pulse: runs beside the services, to show the parent that the event loop goes on.
        lead, parent: the arguments of `Replica`.
    Raises:
        UnavailableError: an address cannot be had.
    """
    torch.set_num_threads(settings.threads)
    predictor.warm()

    async def answer() -> int:
        replica = Replica(predictor, settings, lead, parent)
        beating = asyncio.create_task(pulse())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, replica.ended.set)
        # signals were blocked until there was somebody to hear them
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        await replica.start()
        ready()
        await replica.ended.wait()
        await replica.stop()
        beating.cancel()
        return replica.code

    return asyncio.run(answer())
