"""`HostedServer`: `serve` in a process of its own, held by a program that may not be forked.

The holder asks the supervisor for its status over a connection, a few times a second, and takes the
lines that it writes to standard error. A supervisor that is silent for minutes is killed; one whose
holder is gone answers the requests that it has, and ends. On a cluster the holder is an actor of
each node, since a process of Ray may not be forked.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rayrec.errors import RayrecError, ServingError, as_user_mistake
from rayrec.serve.server.pulse import STARTING_S
from rayrec.serve.server.settings import ServerSettings, ServerStatus

_MOST_LINES = 1000
_LONGEST_TURN_S = 2.0  # time in which the holder did not run is nobody's silence


class HostReport(NamedTuple):
    """Report of a server and its holder.

    Attributes:
        pid: id of the holder's process.
        status: status of the server; None until all replicas answer.
        lines: lines of the server's log since the last report.
        has_ended: the server has ended.
        error: the error with which it ended, if any.
    """

    pid: int
    status: ServerStatus | None
    lines: tuple[str, ...]
    has_ended: bool
    error: RayrecError | None


class HostedServer:
    """A server in a child process; its calls are short.

    Args:
        path, settings: the arguments of `serve`.
        options: its keyword arguments.
    Attributes:
        pid: id of the supervisor's process.
    """

    def __init__(self, path: str, settings: ServerSettings, **options: Any) -> None:
        self._status: ServerStatus | None = None
        self._error: RayrecError | None = None
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.pid = self._process.pid
        theirs.close()
        self._pipe.send((path, settings, options))
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        # a pipe that nobody reads would hold the supervisor up
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()
        self._is_asked = self._is_ending = False
        self._silent_s, self._looked = 0.0, time.monotonic()

    def report(self) -> HostReport:
        """Take what the server has said, ask for its status, and return what is new."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked, _LONGEST_TURN_S)
        self._looked = now
        code = self._process.poll()
        with suppress(EOFError, OSError):
            while self._pipe.poll():
                self._take(self._pipe.recv())
            if code is None and not self._is_asked:
                self._pipe.send_bytes(b"status")
                self._is_asked = True
        if code is not None:
            self._reader.join(1.0)
            if code and self._error is None:
                self._error = ServingError(f"the server ended with code {code}.")
        elif self._status is not None and not self._is_ending and self._silent_s > STARTING_S:
            self._lines.append(f"the server hangs: silent for {self._silent_s:.0f} s; it is killed")
            self._process.kill()
        lines = tuple(self._lines.popleft() for _ in range(len(self._lines)))
        return HostReport(os.getpid(), self._status, lines, code is not None, self._error)

    def terminate(self) -> None:
        """Have it answer the requests that are there, and end."""
        self._is_ending = True
        self._process.terminate()

    def _take(self, said: ServerStatus | RayrecError | None) -> None:
        if isinstance(said, RayrecError):
            self._error = said
        else:
            self._status, self._is_asked, self._silent_s = said, False, 0.0

    def _read_lines(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip("\n"))


def main(descriptor: int) -> int:
    """Serve as the holder at the other end of a connection wants it; return the exit code."""
    from rayrec.serve.server.supervisor import serve

    holder = Connection(descriptor)
    path, settings, options = holder.recv()
    try:
        serve(path, settings, holder=holder, **options)
    except RayrecError as error:
        with suppress(OSError):
            holder.send(as_user_mistake(error, str(error)) or ServingError(str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
