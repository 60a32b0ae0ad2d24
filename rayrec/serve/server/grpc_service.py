"""The gRPC side of a replica: bytes in and bytes out, without generated code.

Predict takes an Arrow stream and answers with one; Score takes and answers the messages of
deploy/serving/serving.proto. `grpc.health.v1` says what /ready says, to Kubernetes' probes, proxies
and clients of gRPC: Check answers at once; Watch goes on to answer when that changes, and ends with
the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import grpc
import grpc.aio

from rayrec.errors import InputError, UnavailableError
from rayrec.serve.protobuf import PROTOBUF_TYPE, fields_of, message
from rayrec.serve.server.answering import Answering
from rayrec.serve.server.faults import ErrorReply
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.wire import ARROW_TYPE, METHOD, SCORE_METHOD, SERVICE

HEALTH_SERVICE = "grpc.health.v1.Health"
_STATUS = 1  # field of HealthCheckResponse
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
# an end is waited for until no request has been pending for so long, looked at so often
_QUIET_S, _TURN_S = 3.0, 0.1


class Health:
    """Readiness of a replica for requests; made inside of a running event loop."""

    def __init__(self) -> None:
        self.is_ready = False
        self._changed = asyncio.Event()

    def set_ready(self, is_ready: bool) -> None:
        """Set the readiness, and notify those who watch."""
        self.is_ready = is_ready
        self._changed.set()
        self._changed = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler of the methods Check and Watch."""
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if not await _is_known(request, context):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service here.")
        return self._status()

    async def _watch(
        self, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        if not await _is_known(request, context):
            yield message({_STATUS: _SERVICE_UNKNOWN})
            return
        while True:
            changed = self._changed
            yield self._status()
            if not self.is_ready:  # a replica does not become ready again
                return
            await changed.wait()

    def _status(self) -> bytes:
        return message({_STATUS: _SERVING if self.is_ready else _NOT_SERVING})


async def _is_known(request: bytes, context: grpc.aio.ServicerContext) -> bool:
    """Return True if a request names the whole server or its one service."""
    try:
        service = fields_of(request).get(1, b"")
    except InputError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    return service in (b"", SERVICE.encode())


class GrpcService:
    """Answers /rayrec.Serving/Predict and Score, and /grpc.health.v1.Health/Check and Watch."""

    def __init__(self, answering: Answering, health: Health, settings: ServerSettings) -> None:
        self._answering, self._settings = answering, settings
        self._pending = 0  # calls whose request has come, and whose answer has not gone
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 1),
            ]
        )
        # no serializers: the handler takes and gives bytes
        kinds = {METHOD: ARROW_TYPE, SCORE_METHOD: PROTOBUF_TYPE}
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(partial(self._answer, kind))
            for method, kind in kinds.items()
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers([generic, health.handler()])

    async def start(self) -> None:
        """Start to listen.

        Raises:
            UnavailableError: the address cannot be had.
        """
        address = self._settings.address(self._settings.port)
        try:
            self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise UnavailableError(f"gRPC cannot listen at {address}: {error}.") from error
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and wait at most `seconds` for the answers of pending ones.

        gRPC also waits for calls whose request does not come. They are left when nothing else has
        been pending for `_QUIET_S`.
        """
        ending, quiet_s = asyncio.ensure_future(self._server.stop(seconds)), 0.0
        while not ending.done() and quiet_s < _QUIET_S:
            await asyncio.wait([ending], timeout=_TURN_S)
            quiet_s = 0.0 if self._pending else quiet_s + _TURN_S

    def _gone(self, _: grpc.aio.ServicerContext) -> None:
        self._pending -= 1

    async def _answer(self, kind: str, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self._pending += 1
        context.add_done_callback(self._gone)
        waits_s = context.time_remaining()
        answer = await self._answering.answer("grpc", kind, message, waits_s)
        if isinstance(answer, ErrorReply):
            await context.abort(grpc.StatusCode[answer.code], answer.text)
            raise AssertionError("abort raises")
        return answer
