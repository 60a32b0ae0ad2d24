"""`Replica`: one process that answers, from its first request to its end.

Its event loop takes and sends messages; one more thread reads large ones (`answering`), and one
scores (`scoring_queue`). At SIGTERM it says that it is not ready, answers as before for a while, in
which proxies and clients turn to others, takes no more requests then, answers those that it has,
and ends with code 0.
"""

from __future__ import annotations

import asyncio
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from prometheus_client import values

from rayrec.serve.predictor import Predictor
from rayrec.serve.server.answering import Answering
from rayrec.serve.server.grpc_service import GrpcService, Health
from rayrec.serve.server.http_service import HttpService
from rayrec.serve.server.leading import Following, Lead
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.pulse import Pulses
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.server.telling import say
from rayrec.storage import one_line

_AGAIN_S = 10.0  # until an event loop says the same again
_MOST_KEPT = 100


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
        try:
            async with asyncio.timeout(most):
                await asyncio.gather(self.grpc.stop(most), self.http.stop())
                if not self.code:
                    await self.answering.queue.drain()
        except TimeoutError:
            # connections whose request has not come are nobody's loss
            self.code = self.code or int(self.answering.pending > 0)
        # no earlier: other replicas wait until this one has changed over, too
        if self.following is not None:
            self.following.close()
        self.answering.close()

    def _fail(self) -> None:
        self.code = 1
        self.ended.set()


class Complaints:
    """Exception handler of an event loop, which says each thing once within some seconds.

    A process without file descriptors would otherwise write hundreds of tracebacks a second.
    """

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message, error = context["message"], context.get("exception")
        now = time.monotonic()
        if now < self._said.get(message, 0.0):
            return
        if len(self._said) >= _MOST_KEPT:
            self._said.clear()
        self._said[message] = now + _AGAIN_S
        if isinstance(error, OSError):
            say(f"{message}: {one_line(error)}")
        else:
            loop.default_exception_handler(context)


def run_replica(
    predictor: Predictor,
    settings: ServerSettings,
    number: int,
    parent: Connection,
    pulses: Pulses,
    lead: Lead | None,
) -> int:
    """Answer requests until SIGTERM or SIGINT, and return the exit code.

    Args:
        number: number of the replica.
        parent: told when requests are taken; the connection to the lead where there is one.
        pulses: shown to the parent while the event loop goes on.
    Raises:
        UnavailableError: an address cannot be had.
    """
    # one that is started again goes on with the numbers of the one before, in the same files
    values.ValueClass = values.MultiProcessValue(lambda: number)
    torch.set_num_threads(settings.threads)
    predictor.warm()

    async def answer() -> int:
        replica = Replica(predictor, settings, lead, parent)
        beating = asyncio.create_task(pulses.beat(number))
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, replica.ended.set)
        # signals were blocked until there was somebody to hear them
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        await replica.start()
        parent.send_bytes(b"ready")
        await replica.ended.wait()
        await replica.stop()
        beating.cancel()
        return replica.code

    return asyncio.run(answer())
