"""`Health`: readiness of a replica for requests, served by gRPC's health protocol.

`grpc.health.v1.Health` is what Kubernetes' probes, proxies and clients of gRPC ask. Check answers
at once; Watch goes on to answer when that changes, and ends with the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from rayrec.errors import InputError
from rayrec.serve.protobuf import fields_of, message
from rayrec.serve.wire import SERVICE

HEALTH_SERVICE = "grpc.health.v1.Health"
_STATUS = 1  # field of HealthCheckResponse
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


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
