"""`serve_on_cluster`: joins a cluster, reserves resources, and runs a server's replicas there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rayrec.driver.cluster import connected
from rayrec.machine.signals import hold_signals
from rayrec.serve.artifact import local_folder
from rayrec.serve.cluster.placing import room_for
from rayrec.serve.cluster.replica import ReplicaActor
from rayrec.serve.cluster.replicas import Replicas
from rayrec.serve.server.needed import check_installed
from rayrec.serve.server.settings import ServerSettings


def serve_on_cluster(
    path: str | os.PathLike[str], settings: ServerSettings, *, address: str = ""
) -> None:
    """Serve an artifact by replicas on the nodes of a Ray cluster until SIGTERM or SIGINT.

    Args:
        path: path of the artifact, the same on every node.
        settings: `replicas` are those of the whole cluster; each holds `threads` CPUs of it.
        address: host:port of the cluster; "auto" finds one of this machine. By default
            RAY_ADDRESS, or "auto".
    Raises:
        ArtifactError: a node does not see the artifact, or another version of it; names the host.
        ConfigError: nothing answers at the address, there is no room, or no port is free.
        ServingError: a replica cannot start, or some were ended with requests unanswered.
    """
    with hold_signals() as signals:

        def check() -> None:
            # `ray.init` took SIGTERM for itself
            signals.install()
            signals.check()

        with served_on_cluster(path, settings, address=address, check=check) as replicas:
            while not signals.came:
                replicas.watch()


@contextmanager
def served_on_cluster(
    path: str | os.PathLike[str],
    settings: ServerSettings,
    *,
    address: str = "",
    check: Callable[[], None] = lambda: None,
) -> Iterator[Replicas]:
    """Serve as `serve_on_cluster` does inside the block; all replicas answer when it begins.

    Args:
        check: called several times a second before that; its error ends the start.
    Raises:
        RayrecError: an error of `serve_on_cluster`.
    """
    import ray

    folder = str(local_folder("the artifact", path))
    check_installed()
    with (
        connected(address=_address(address)) as cluster,
        room_for(settings, cluster, check) as group,
    ):
        actors = [_actor(settings, group, number) for number in range(settings.replicas)]
        try:
            replicas = Replicas(actors, folder, settings)
            replicas.start(check)
            yield replicas
            replicas.drain()
        finally:
            for actor in actors:
                ray.kill(actor, no_restart=True)


def _address(given: str) -> str:
    """Return the address of the cluster to join; "" for that of RAY_ADDRESS."""
    is_named = os.environ.get("RAY_ADDRESS", "") not in ("", "local")
    if given in ("", "auto"):
        return "" if is_named else "auto"
    return given


def _actor(settings: ServerSettings, group: Any, number: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    options = ray.remote(ReplicaActor).options(
        num_cpus=settings.threads, max_restarts=-1, scheduling_strategy=place
    )
    return options.remote()
