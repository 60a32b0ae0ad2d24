"""`ServerSettings` and `ServerStatus`: the addresses and limits of a server, and its version.

And what it needs beside rayrec; this file imports none of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from rayrec import checks
from rayrec.errors import ConfigError
from rayrec.serve.signing import key_place

GRPC_PORT, HTTP_PORT = 8500, 8501
MAX_PORT = 65535
LOOPBACK = "127.0.0.1"
_LOCAL = (LOOPBACK, "::1", "localhost")
# variable that names the folder in which all replicas keep their metrics
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_PACKAGES = {"grpc": "grpcio", "aiohttp": "aiohttp", "prometheus_client": "prometheus-client"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Addresses and limits of a server.

    Attributes:
        host: name or address to listen at; the default is reached from this machine alone.
        port: port of gRPC; 0 takes a free one.
        http_port: port of HTTP; 0 takes a free one.
        replicas: number of processes that answer at these ports.
        threads: cores that one replica scores with.
        max_batch_rows: rows that are scored in one call at most, where requests wait for each
            other; a larger request is scored alone.
        max_rows: rows of one request at most.
        max_bytes: bytes of one request at most.
        queue_rows: rows that may wait in one replica; beyond them a request is refused.
        lame_duck_s: seconds in which a server that was told to end says that it is not ready, and
            answers as before.
        drain_s: seconds that requests have to be answered afterwards.
        poll_s: seconds between two looks for a publication, for a server that follows a chain.
        strict: keep two copies of the tables in such a server, so that no batch meets rows of two
            versions.
        trusted: allow an artifact to run code of whoever exported it.
        signing_key: place of the key that an artifact has to be signed with; None asks for none.
    Raises:
        ConfigError: a number is out of range, or the two ports are one.
    """

    host: str = LOOPBACK
    port: int = GRPC_PORT
    http_port: int = HTTP_PORT
    replicas: int = 1
    threads: int = 1
    max_batch_rows: int = 1024
    max_rows: int = 16384
    max_bytes: int = 4 << 20
    queue_rows: int = 16384
    lame_duck_s: float = 1.0
    drain_s: float = 30.0
    poll_s: float = 1.0
    strict: bool = True
    trusted: bool = True
    signing_key: str | None = None

    def __post_init__(self) -> None:
        for name in ("port", "http_port"):
            checks.whole_number(name, getattr(self, name), 0, MAX_PORT)
        for name in ("replicas", "threads", "max_batch_rows", "max_rows"):
            checks.whole_number(name, getattr(self, name), 1, 1 << 20)
        checks.whole_number("max_bytes", self.max_bytes, 1 << 10, 1 << 30)
        checks.whole_number("queue_rows", self.queue_rows, 1, 1 << 30)
        if self.lame_duck_s != 0:
            checks.seconds("lame_duck_s", self.lame_duck_s)
        checks.seconds("drain_s", self.drain_s)
        checks.seconds("poll_s", self.poll_s)
        if self.port and self.port == self.http_port:
            raise ConfigError(f"port={self.port} is both that of gRPC and of HTTP; give two.")
        object.__setattr__(self, "signing_key", key_place("signing_key", self.signing_key))
        if not self.host.strip():
            raise ConfigError(
                f"host={self.host!r}; give the address to listen at, such as {LOOPBACK}."
            )

    @property
    def queue_bytes(self) -> int:
        """Number of bytes of requests that may wait in one replica."""
        return 16 * self.max_bytes

    @property
    def end_s(self) -> float:
        """Longest time in seconds from a request to end until a replica has ended."""
        return self.lame_duck_s + self.drain_s

    @property
    def is_local(self) -> bool:
        """True if only programs of this machine can reach the server."""
        return self.host in _LOCAL

    def address(self, port: int) -> str:
        """Host and port as one text, also of an address with colons."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


class ServerStatus(NamedTuple):
    """Status of a server whose replicas answer.

    Attributes:
        settings: settings with the ports at which it listens.
        version, step: name and step of its weights.
    """

    settings: ServerSettings
    version: str
    step: int

    @property
    def grpc(self) -> str:
        """Host and port of gRPC."""
        return self.settings.address(self.settings.port)

    @property
    def http(self) -> str:
        """Host and port of HTTP."""
        return self.settings.address(self.settings.http_port)


def check_installed() -> None:
    """Check that the packages of a server are installed.

    Raises:
        ConfigError: names the packages that are missing, and the extra.
    """
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"a server needs {', '.join(missing)}. Install what is missing with pip install "
            "'rayrec[serve]'."
        )
