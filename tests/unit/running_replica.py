"""A replica that answers inside of this process, for tests, and a predictor that can be held."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from rayrec.serve import Client, Predictor
from rayrec.serve.server.held import reserved
from rayrec.serve.server.replica import Replica
from rayrec.serve.server.settings import ServerSettings


class HeldPredictor(Predictor):
    """A predictor whose thread waits where `hold` was called, and breaks at one price."""

    gate = threading.Event()
    gate.set()
    BREAKS_AT = 666.0

    def score_and_weights(self, request):
        self.gate.wait(200)
        if (request.dense[:, 1] == self.BREAKS_AT).any():
            raise RuntimeError("a defect")
        return super().score_and_weights(request)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is scored in here."""
        self.gate = threading.Event()
        try:
            yield
        finally:
            self.gate.set()


class Running(NamedTuple):
    """A replica in an event loop of its own."""

    replica: Replica
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.replica.settings.port}"

    def client(self, **settings: Any) -> Client:
        # a busy machine is slow, and no test waits for this time to pass
        return Client(self.address, **{"timeout_s": 200, **settings})

    def stop(self) -> Future[None]:
        """Begin to drain."""
        return asyncio.run_coroutine_threadsafe(self.replica.stop(), self.loop)

    def http(
        self, path: str, body: Any = None, kind: str = "application/json", method: str = ""
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, parsed body and headers of an answer."""
        link = http.client.HTTPConnection("127.0.0.1", self.replica.settings.http_port, timeout=200)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            link.request(
                method or ("GET" if body is None else "POST"), path, data, {"content-type": kind}
            )
            answer = link.getresponse()
            content = answer.read()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            if headers["content-type"].startswith("application/json"):
                return answer.status, json.loads(content), headers
            return answer.status, content, headers
        finally:
            link.close()

    def numbers(self) -> dict[str, float]:
        """The metrics, by name and labels."""
        lines = self.http("/metrics")[1].decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}


@contextmanager
def running(predictor: Predictor, **settings: Any) -> Iterator[Running]:
    """A replica at free ports; it has ended afterwards."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start(own: ServerSettings) -> Replica:
        replica = Replica(predictor, own)
        await replica.start()
        return replica

    free = {"port": 0, "http_port": 0, "lame_duck_s": 0}
    try:
        with reserved(ServerSettings(**free | settings)) as own:
            replica = asyncio.run_coroutine_threadsafe(start(own), loop).result(30)
            one = Running(replica, loop)
            try:
                yield one
            finally:
                one.stop().result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
