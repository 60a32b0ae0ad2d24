"""`ReadingThread`: requests are read beside the event loop, which answers health checks meanwhile.

A request in JSON is Python's work, and one of megabytes has many values to check. A small Arrow
stream is read at once, since a thread would take longer to hear of it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rayrec.errors import OverloadedError
from rayrec.serve.server.body import Asked, asked
from rayrec.serve.server.untrusted import RequestReader
from rayrec.serve.wire import ARROW_TYPE

_SMALL_BYTES = 1 << 16


class ReadingThread:
    """Reads the requests of one replica, at most one at a time beside the event loop.

    Args:
        reader: reader of the columns of a request.
        most_bytes: bytes that may wait to be read; beyond them a request is refused.
    """

    def __init__(self, reader: RequestReader, most_bytes: int) -> None:
        self._reader, self._most_bytes = reader, most_bytes
        self._thread = ThreadPoolExecutor(1, "reading")
        self._bytes = 0

    async def read(self, content_type: str, body: bytes) -> Asked:
        """Read the request in a body.

        Raises:
            InputError: the body is no valid request; see `asked`.
            OverloadedError: too many bytes wait to be read.
        """
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
                self._thread, asked, self._reader, content_type, body
            )
        finally:
            self._bytes -= size

    def close(self) -> None:
        """End the thread, after what it is reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)
