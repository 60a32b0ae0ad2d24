"""`HostActor`: the server of one node, as a Ray actor.

The server is the one of `rayrec serve`: a supervisor with its forked replicas, in a process of its
own, since a process of Ray may not be forked. The actor starts it, hands over what it says, and
ends it; when the actor is lost, the server answers what it has and ends.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

from rayrec.errors import ConfigError, RayrecError
from rayrec.serve.server.hosted import HostedServer
from rayrec.serve.server.needed import check_installed
from rayrec.serve.server.settings import ServerSettings, ServerStatus

_ANY_HOST = ("0.0.0.0", "::")


class HostReport(NamedTuple):
    """Report of a host.

    Attributes:
        pid: id of the actor's process.
        status: status of its server, with the address at which others reach it; None until all
            replicas answer.
        lines: lines of the server's log since the last report.
        has_ended: its server has ended.
        error: the error with which it ended, if any.
    """

    pid: int
    status: ServerStatus | None
    lines: tuple[str, ...]
    has_ended: bool
    error: RayrecError | None


class HostActor:
    """Ray actor of the server of one node; its calls are short."""

    def look(self, path: str, settings: ServerSettings, follow: bool) -> str:
        """Return the version of the artifact at a path, or the run of the chain there.

        It reads the manifest or a record alone.

        Raises:
            ArtifactError: this host has no artifact or no chain there.
            ConfigError: the artifact has no schema, or a key or a package is missing on this host.
        """
        check_installed()
        return _run_of(path, settings) if follow else _version_of(path)

    def serve(self, path: str, settings: ServerSettings, options: dict[str, Any]) -> None:
        """Start the server; the arguments are those of `HostedServer`."""
        self._server = HostedServer(path, settings, **options)

    def report(self) -> HostReport:
        """Return the newest report of this host."""
        server = self._server
        runs, status = server.poll(), server.status
        if status is not None and status.settings.host in _ANY_HOST:
            import ray

            reached = replace(status.settings, host=ray.util.get_node_ip_address())
            status = status._replace(settings=reached)
        return HostReport(os.getpid(), status, server.take_lines(), not runs, server.error)

    def stop(self) -> None:
        """Have the server answer the requests that are there, and end."""
        self._server.terminate()


def _version_of(path: str) -> str:
    from rayrec.serve.artifact import SCHEMA, local_folder
    from rayrec.serve.manifest import Manifest

    manifest = Manifest.read_file(local_folder("the artifact", path))
    if manifest.schema is None:
        raise ConfigError(
            f"{path} has no {SCHEMA}, so a server cannot read columns; export the checkpoint with "
            "schema=."
        )
    return manifest.version


def _run_of(path: str, settings: ServerSettings) -> str:
    from rayrec.serve.chain.folder import ChainFolder
    from rayrec.serve.signing import SigningKey

    folder = ChainFolder.of_run(path, SigningKey.read(settings.signing_key))
    return folder.newest(folder.read).run
