"""`Answering`: a request from its bytes to those of the answer, for gRPC, HTTP and Ray Serve.

Requests are read beside the event loop, which answers health checks meanwhile: one in JSON is
Python's work, and one of megabytes has many values to check. A small Arrow stream is read at once,
since a thread would take longer to hear of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from rayrec.errors import InputError, OverloadedError
from rayrec.serve.predictor import Predictor
from rayrec.serve.server.body import Asked, asked, type_trouble, written
from rayrec.serve.server.faults import CANCELLED, INPUT, OK, ErrorReply, fault_of
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.scoring_queue import ScoringQueue
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.server.untrusted import RequestReader
from rayrec.serve.weights import Weights
from rayrec.serve.wire import ARROW_TYPE, Answer

_SMALL_BYTES = 1 << 16


class Answering:
    """Reads, scores and counts requests; made inside of a running event loop.

    Args:
        failed: called in the event loop when the scoring thread ends by a defect, or hangs.
    Attributes:
        pending: number of requests that have come and were not answered.
        queue: requests that were read, and the thread that scores them.
        metrics: numbers of the replica.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: ServerSettings,
        metrics: Metrics,
        failed: Callable[[], None],
    ) -> None:
        assert predictor.schema is not None, "`served_predictor` has looked"
        columns = predictor.schema.columns(with_labels=False)
        self._reader = RequestReader(columns, settings.max_rows)
        self._reading = ThreadPoolExecutor(1, "reading")
        self._bytes, self._most_bytes = 0, settings.queue_bytes
        self.pending = 0
        self._predictor = predictor
        self.queue = ScoringQueue(predictor, settings, metrics, failed)
        self.metrics = metrics

    @property
    def weights(self) -> Weights:
        """Weights that the next request is scored with."""
        return self._predictor.weights

    async def answer(
        self, protocol: str, content_type: str, body: bytes, timeout_s: float | None = None
    ) -> bytes | ErrorReply:
        """Return the answer to a body, of the same content type, or its error; counts either.

        Args:
            timeout_s: seconds that the caller waits; None where the body may say it.
        """
        start, outcome = perf_counter(), CANCELLED
        self.pending += 1
        try:
            if trouble := type_trouble(content_type):
                outcome = INPUT
                return ErrorReply(INPUT, "INVALID_ARGUMENT", 415, InputError.__name__, trouble)
            content = written(await self.score(content_type, body, timeout_s), content_type)
            outcome = OK
            return content
        except Exception as error:
            fault = fault_of(error)
            outcome = fault.outcome
            return fault
        finally:
            self.pending -= 1
            self.metrics.answered(protocol, outcome, perf_counter() - start)

    async def score(self, content_type: str, body: bytes, timeout_s: float | None = None) -> Answer:
        """Return the scores of the rows in a body.

        The time in which the body waits and is read is a part of the caller's.

        Raises:
            InputError: the body is no valid request; see `asked`.
            OverloadedError: too many bytes wait to be read.
            RayrecError: an error of `ScoringQueue.score`.
        """
        start = perf_counter()
        request = await self._read(content_type, body)
        if timeout_s is not None:
            request = request._replace(timeout_s=timeout_s)
        return await self.queue.score(request, perf_counter() - start)

    async def _read(self, content_type: str, body: bytes) -> Asked:
        size = len(body)
        if content_type == ARROW_TYPE and size <= _SMALL_BYTES:
            return asked(self._reader, content_type, body)
        if self._bytes and self._bytes + size > self._most_bytes:
            raise OverloadedError(
                f"{self._bytes} bytes wait to be read, and {self._most_bytes} may; ask again a "
                "little later."
            )
        self._bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._reading, asked, self._reader, content_type, body
            )
        finally:
            self._bytes -= size

    def close(self) -> None:
        """End the threads, after what they are at."""
        self._reading.shutdown(wait=False, cancel_futures=True)
        self.queue.close()
