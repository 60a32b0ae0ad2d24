"""The HTTP side of a replica: JSON for people, Arrow for programs, and what a host asks.

POST /predict    {"columns": {"user": [7]}} or {"rows": [{"user": 7}]}, with "timeout_ms" where
                 the caller does not wait for ever, and "user": {"age": 30} with what is the same
                 for all rows; or an Arrow stream, or deploy/serving/serving.proto, answered by such
GET /health      200 while the process works
GET /ready       200 while it is to be given requests, 503 before its end
GET /metrics     for Prometheus
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from aiohttp import web

from rayrec.errors import InputError, UnavailableError
from rayrec.serve.server.answering import Answering
from rayrec.serve.server.faults import CANCELLED, INPUT, ErrorReply, fault_of
from rayrec.serve.server.grpc_service import Health
from rayrec.serve.server.metrics import CONTENT_TYPE
from rayrec.serve.server.settings import ServerSettings

_PATHS = "there are POST /predict, and GET /health, /ready and /metrics."
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpService:
    """Answers the paths above."""

    def __init__(self, answering: Answering, health: Health, settings: ServerSettings) -> None:
        self._answering, self._health, self._settings = answering, health, settings
        self.chain: Callable[[], dict[str, str]] = dict
        app = web.Application(middlewares=[_as_json], client_max_size=settings.max_bytes)
        app.router.add_post("/predict", self._predict)
        app.router.add_get("/health", self._alive)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._text)
        app.on_response_prepare.append(self._say_last)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=settings.drain_s,
            handle_signals=False,
            handler_cancellation=True,  # nobody reads the answer to a client that is gone
        )

    async def start(self) -> None:
        """Start to listen.

        Raises:
            UnavailableError: the address cannot be had.
        """
        await self._runner.setup()
        host, port = self._settings.host, self._settings.http_port
        try:
            await web.TCPSite(self._runner, host, port, reuse_port=True).start()
        except OSError as error:
            raise UnavailableError(f"HTTP cannot listen at {host}:{port}: {error}.") from error

    async def stop(self) -> None:
        """Take no more requests, and wait for the answers of pending ones."""
        await self._runner.cleanup()

    async def _predict(self, request: web.Request) -> web.Response:
        outcome = CANCELLED
        try:
            body = await request.read()
            outcome = ""  # of a body that came, `answer` counts
        except web.HTTPException:
            outcome = INPUT
            raise
        except (ConnectionError, web.RequestPayloadError) as error:
            # the body did not come to its end, so nobody may be there to read this
            raise web.HTTPBadRequest(text=f"the body cannot be read: {error}.") from error
        except Exception as error:
            fault = fault_of(error)
            outcome = fault.outcome
            return _error(fault.status, fault.error, fault.text)
        finally:
            if outcome:
                self._answering.metrics.answered("http", outcome, 0.0)
        answer = await self._answering.answer("http", request.content_type, body)
        if isinstance(answer, ErrorReply):
            return _error(answer.status, answer.error, answer.text)
        return web.Response(body=answer, content_type=request.content_type)

    async def _say_last(self, _: web.Request, response: web.StreamResponse) -> None:
        """Ask a client to open another connection, since this one is about to be closed."""
        if not self._health.is_ready:
            response.force_close()
            # aiohttp has written its own header by now
            response.headers["connection"] = "close"

    async def _alive(self, _: web.Request) -> web.Response:
        weights = self._answering.weights
        said = {"status": "alive", "version": weights.name, "step": weights.step}
        said |= {"pid": os.getpid()}
        return web.json_response(said | self.chain())

    async def _ready(self, _: web.Request) -> web.Response:
        if not self._health.is_ready:
            return _error(503, UnavailableError.__name__, "the replica is about to end.")
        return web.json_response({"status": "ready", "version": self._answering.weights.name})

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._answering.metrics.text(), headers={"content-type": CONTENT_TYPE}
        )


def _error(status: int, error: str, text: str) -> web.Response:
    headers = {"retry-after": "1"} if status == 503 else {}
    said = {"error": error, "message": text}
    return web.json_response(said, status=status, headers=headers)


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of HTTP itself (no such path, too large a body) in the form of all others."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if error.status in (404, 405):  # no mistake in rows
            said = f"{request.method} {request.path} is not answered; {_PATHS}"
            answer = _error(error.status, type(error).__name__.removeprefix("HTTP"), said)
            answer.headers.update({n: v for n, v in error.headers.items() if n == "Allow"})
            return answer
        text = error.text or error.reason
        return _error(error.status, InputError.__name__, " ".join(text.split()))
