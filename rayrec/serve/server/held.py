"""Resources that the parent of the replicas holds for them: ports, and the folder of metrics.

The ports are bound without listening, so that no other server can share them by mistake.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from rayrec.errors import ConfigError
from rayrec.serve.server.settings import METRICS_FOLDER, ServerSettings
from rayrec.storage import one_line

_LIVE = "livesum", "livemin", "livemax"  # modes of the gauges of `metrics`


@contextmanager
def reserved(settings: ServerSettings, tries: int = 1) -> Iterator[ServerSettings]:
    """Hold the ports of a server inside the block; yields the settings with these ports.

    Args:
        tries: number of pairs to try: the given one, and each time the one two higher.
    Raises:
        ConfigError: the host is unknown, or no pair is free.
    """
    with ExitStack() as stack:
        for number in range(tries):
            ports = {
                name: getattr(settings, name) and getattr(settings, name) + 2 * number
                for name in ("port", "http_port")
            }
            own = replace(settings, **ports)
            try:
                held = {name: stack.enter_context(_reserve(own, name)) for name in ports}
                break
            except ConfigError:
                stack.close()
                if number == tries - 1:
                    raise
        yield replace(settings, **{name: one.getsockname()[1] for name, one in held.items()})


def _reserve(settings: ServerSettings, name: str) -> socket.socket:
    """Return a socket bound to a free port, which other processes of this user may share."""
    port: int = getattr(settings, name)
    where = f"{settings.address(port)} ({name})"
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # without the option first, as nobody shares a port with it
        with socket.socket(kind, socket.SOCK_STREAM) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            alone.listen(1)
            address = alone.getsockname()
            # of two servers that start at once, one is between these two sockets at a time
            with socket.socket(socket.AF_UNIX) as turn:
                turn.bind(f"\0rayrec-serve-{address[1]}")
                alone.close()
                held = socket.socket(kind, socket.SOCK_STREAM)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                held.bind(address)
    except OSError as error:
        raise ConfigError(
            f"the server cannot listen at {where}: {one_line(error)}. Give another port, or 0 for "
            "a free one, or a host of this machine."
        ) from None
    return held


@contextmanager
def metrics_folder() -> Iterator[None]:
    """Keep a folder for the metrics of the replicas inside the block."""
    before = os.environ.get(METRICS_FOLDER)
    with tempfile.TemporaryDirectory(prefix="rayrec-serve-", ignore_cleanup_errors=True) as folder:
        os.environ[METRICS_FOLDER] = folder
        try:
            yield
        finally:
            os.environ.pop(METRICS_FOLDER)
            if before is not None:
                os.environ[METRICS_FOLDER] = before


def keep_folder() -> None:
    """Make the folder of the metrics again where it is gone, as temporary folders may be.

    Raises:
        OSError: the file system refuses.
    """
    os.makedirs(os.environ[METRICS_FOLDER], 0o700, exist_ok=True)


def forget_numbers(replica: int) -> None:
    """Drop the gauges of a replica that is dead from the sums."""
    # by their names, which takes no file descriptor
    for mode in _LIVE:
        with suppress(OSError):
            os.unlink(os.path.join(os.environ[METRICS_FOLDER], f"gauge_{mode}_{replica}.db"))
