"""The gRPC side of a replica: bytes in and bytes out, without generated code.

Predict takes an Arrow stream and answers with one; Score takes and answers the messages of
deploy/serving/serving.proto. `grpc.health.v1` says what /ready says.
"""

from __future__ import annotations

from typing import NoReturn

import grpc
import grpc.aio

from rayrec.errors import UnavailableError
from rayrec.serve.protobuf import PROTOBUF_TYPE
from rayrec.serve.server.answering import Answering
from rayrec.serve.server.faults import ErrorReply
from rayrec.serve.server.health import Health
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.wire import ARROW_TYPE, METHOD, SCORE_METHOD, SERVICE


class GrpcService:
    """Answers /rayrec.Serving/Predict and Score, and /grpc.health.v1.Health/Check and Watch.

    Attributes:
        port: at which it listens, after `start`.
    """

    def __init__(self, answering: Answering, health: Health, settings: ServerSettings) -> None:
        self._answering, self._settings = answering, settings
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", settings.max_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 1),
            ]
        )
        # no serializers: the handler takes and gives bytes
        handlers = {
            METHOD: grpc.unary_unary_rpc_method_handler(self._predict),
            SCORE_METHOD: grpc.unary_unary_rpc_method_handler(self._score),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers([generic, health.handler()])
        self.port = settings.port

    async def start(self) -> None:
        """Start to listen.

        Raises:
            UnavailableError: the address cannot be had.
        """
        address = self._settings.address(self._settings.port)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise UnavailableError(f"gRPC cannot listen at {address}: {error}.") from error
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and wait at most `seconds` for the answers of pending ones."""
        await self._server.stop(seconds)

    async def _predict(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return await self._answer(message, ARROW_TYPE, context)

    async def _score(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return await self._answer(message, PROTOBUF_TYPE, context)

    async def _answer(self, message: bytes, kind: str, context: grpc.aio.ServicerContext) -> bytes:
        waits_s = context.time_remaining()
        answer = await self._answering.answer("grpc", kind, message, waits_s)
        if isinstance(answer, ErrorReply):
            await _abort(context, answer.code, answer.text)
        return answer


async def _abort(context: grpc.aio.ServicerContext, code: str, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode[code], text)
    raise AssertionError("abort raises")
