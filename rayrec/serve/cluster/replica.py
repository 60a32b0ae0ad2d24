"""`ReplicaActor`: one replica of a server as a Ray actor.

It holds the `Replica` that a process of `rayrec serve` holds, in the event loop of the actor. Its
call `serve` lasts as long as the replica answers. When the process or the node is lost, Ray starts
the actor again, on another node where it has to, and repeats that call.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rayrec.errors import ArtifactError, ConfigError, RayrecError, ServingError, as_user_mistake
from rayrec.machine.memory import tune_malloc
from rayrec.serve.server.held import reserved
from rayrec.serve.server.needed import check_installed
from rayrec.serve.server.settings import ServerSettings
from rayrec.storage import one_line

if TYPE_CHECKING:
    from rayrec.serve.predictor import Predictor
    from rayrec.serve.server.replica import Replica

_ANY_HOST = ("0.0.0.0", "::")


class Seen(NamedTuple):
    """Artifact as a host sees it: address of the host, version and step of the weights."""

    host: str
    version: str
    step: int


class Where(NamedTuple):
    """Addresses and process of a replica that answers.

    Attributes:
        host: address of its node.
        node: Ray's id of its node.
        pid: id of its process.
        grpc, http: address and port at which it listens.
    """

    host: str
    node: str
    pid: int
    grpc: str
    http: str


class ReplicaActor:
    """Ray actor of one replica; all calls run in one event loop."""

    def __init__(self) -> None:
        tune_malloc()
        self._where: Where | None = None
        self._replica: Replica | None = None
        self._is_ending = False

    async def look(self, path: str) -> Seen:
        """Return version and step of the artifact on this host; reads the manifest alone.

        Raises:
            ArtifactError: this host has no artifact there.
            ConfigError: the artifact has no schema, or a package is missing on this host.
        """
        with _on_host():
            return await asyncio.to_thread(_seen, path)

    async def serve(self, path: str, settings: ServerSettings, version: str) -> int:
        """Answer requests until `stop`; return 0 if all were answered.

        Args:
            version: version of the weights; a host that has another one does not serve.
        Raises:
            ArtifactError: a file is missing or damaged, or the version is another.
            ConfigError: no port is free.
        """
        with _on_host(), ExitStack() as stack:
            predictor = await asyncio.to_thread(_load, path, settings, version)
            own = stack.enter_context(_first_free(settings))
            code = await self._answer(predictor, own)
        if not self._is_ending:
            # its thread has met a defect; Ray starts a fresh process
            os._exit(1)
        return code

    async def where(self) -> Where | None:
        """Return the addresses of the replica; None until it answers."""
        return self._where

    async def stop(self) -> None:
        """Have `serve` answer the requests that are there, and return."""
        self._is_ending = True
        if self._replica is not None:
            self._replica.ended.set()

    async def _answer(self, predictor: Predictor, settings: ServerSettings) -> int:
        from rayrec.serve.server.replica import Replica

        replica = self._replica = Replica(predictor, settings)
        try:
            await replica.start()
            self._where = _where(settings)
            if not self._is_ending:
                await replica.ended.wait()
        finally:
            self._where = None
            await replica.stop()
        return replica.code


def _seen(path: str) -> Seen:
    from rayrec.serve.artifact import SCHEMA, local_folder, read_manifest

    check_installed()
    manifest = read_manifest(local_folder("the artifact", path))
    if manifest.schema is None:
        raise ConfigError(
            f"{path} has no {SCHEMA}, so a server cannot read columns; export the checkpoint with "
            "schema=."
        )
    return Seen(_host(), f"{manifest.step}-{manifest.sha256[:12]}", manifest.step)


def _load(path: str, settings: ServerSettings, version: str) -> Predictor:
    import torch

    from rayrec.serve.predictor import Predictor
    from rayrec.serve.server.served import version_of

    torch.set_num_threads(settings.threads)
    predictor = Predictor.load(path, trusted=settings.trusted, signing_key=settings.signing_key)
    own, _ = version_of(predictor)
    if own != version:
        raise ArtifactError(
            f"{path} is version {own}, and the other replicas serve {version}. Put that back, or "
            "start the server anew."
        )
    predictor.warm()
    return predictor


@contextmanager
def _first_free(settings: ServerSettings) -> Iterator[ServerSettings]:
    """Hold the ports of a replica: those of the settings, or each time two higher.

    Raises:
        ConfigError: none of as many pairs as there are replicas is free.
    """
    with ExitStack() as stack:
        for number in range(settings.replicas):
            port, http_port = (p and p + 2 * number for p in (settings.port, settings.http_port))
            moved = replace(settings, port=port, http_port=http_port)
            try:
                own = stack.enter_context(reserved(moved))
                break
            except ConfigError:
                if number == settings.replicas - 1 or not port:
                    raise
        yield own


def _where(settings: ServerSettings) -> Where:
    import ray

    host = _host()
    told = replace(settings, host=host) if settings.host in _ANY_HOST else settings
    grpc, http = told.address(settings.port), told.address(settings.http_port)
    return Where(host, ray.get_runtime_context().get_node_id(), os.getpid(), grpc, http)


def kill_worker(pid: int) -> None:
    """Kill a process of Ray on this node, if it is still there."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)


def _host() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


@contextmanager
def _on_host() -> Iterator[None]:
    """Name the host in errors; they keep their class where they are a user's mistake."""
    try:
        yield
    except RayrecError as error:
        text = f"on host {_host()}: {one_line(error)}"
        raise (as_user_mistake(error, text) or ServingError(text)) from None
