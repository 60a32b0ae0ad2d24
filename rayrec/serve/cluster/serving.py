"""`serve_on_cluster`: joins a cluster, reserves resources, and runs a server on its nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayrec.driver.cluster import connected
from rayrec.machine.signals import hold_signals
from rayrec.serve.artifact import local_folder
from rayrec.serve.cluster.hosts import Hosts
from rayrec.serve.cluster.placing import room_for
from rayrec.serve.server.settings import ServerSettings, check_installed


def serve_on_cluster(
    path: str | os.PathLike[str],
    settings: ServerSettings,
    *,
    follow: bool = False,
    address: str = "",
) -> None:
    """Serve a model by replicas on the nodes of a Ray cluster until SIGTERM or SIGINT.

    Args:
        path: path of the artifact, the same on every node; with `follow` of a run that publishes,
            or of its publications.
        settings: `replicas` are those of the whole cluster; each holds `threads` CPUs of it.
        follow: serve the publications of a chain, version by version.
        address: host:port of the cluster; "auto" finds one of this machine. By default
            RAY_ADDRESS, or "auto".
    Raises:
        ArtifactError: a node does not see the model, or another one; names the host.
        ConfigError: nothing answers at the address, there is no room, or no port is free.
        ServingError: a server cannot start, or some were ended with requests unanswered.
    """
    with hold_signals() as signals:

        def check() -> None:
            # `ray.init` took SIGTERM for itself
            signals.install()
            signals.check()

        with served_on_cluster(
            path, settings, follow=follow, address=address, check=check
        ) as hosts:
            while not signals.came:
                hosts.watch()


@contextmanager
def served_on_cluster(
    path: str | os.PathLike[str],
    settings: ServerSettings,
    *,
    follow: bool = False,
    address: str = "",
    check: Callable[[], None] = lambda: None,
) -> Iterator[Hosts]:
    """Serve as `serve_on_cluster` does inside the block; all replicas answer when it begins.

    Args:
        check: called several times a second while something is waited for; its error ends the wait.
    Raises:
        RayrecError: an error of `serve_on_cluster`.
    """
    folder = str(local_folder("the artifact", path))
    check_installed()
    with (
        connected(address=_address(address)) as cluster,
        room_for(settings, cluster, check) as group,
    ):
        hosts = Hosts(group, folder, settings, follow, check)
        try:
            hosts.start()
            yield hosts
            hosts.drain()
        finally:
            hosts.kill()


def _address(given: str) -> str:
    """Return the address of the cluster to join; "" for that of RAY_ADDRESS."""
    is_named = os.environ.get("RAY_ADDRESS", "") not in ("", "local")
    if given in ("", "auto"):
        return "" if is_named else "auto"
    return given
