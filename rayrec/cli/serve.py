"""`rayrec serve`: replicas of a predictor that answer gRPC and HTTP."""

from __future__ import annotations

from typing import Any

import click

from rayrec.cli.base import Command, default_option
from rayrec.cli.values import PATH, SECONDS, count


@click.command(
    cls=Command,
    examples="""
rayrec serve served/clicks --replicas 2
rayrec serve --follow runs/clicks --replicas 2
rayrec serve served/clicks --host 0.0.0.0 --port 9000 --http-port 9001
rayrec serve served/clicks --replicas 8 --host 0.0.0.0 --cluster 10.0.0.1:6379
""",
)
@click.argument("artifact", type=PATH, metavar="ARTIFACT", required=False)
@click.option(
    "--follow",
    type=PATH,
    metavar="RUN",
    help="in place of ARTIFACT: serve what a run publishes, from version to version; RUN is its "
    "folder, or that of its publications",
)
@click.option(
    "--poll",
    type=SECONDS,
    metavar="SECONDS",
    help="with --follow: seconds between two looks for a publication (default 1)",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="with --follow: keep one copy of the tables and not two; while a version is applied, a "
    "batch may meet rows of two",
)
@click.option(
    "--untrusted",
    is_flag=True,
    help="run no code of whoever exported ARTIFACT: take its recipe and its tensors, and refuse it "
    "where these do not suffice",
)
@click.option(
    "--signing-key",
    metavar="FILE|env:NAME",
    help="serve only what is signed with the key in a file or an environment variable",
)
@default_option("--replicas", type=count(), default=1, help="processes")
@click.option(
    "--cluster",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="place the replicas on the nodes of a Ray cluster; ADDRESS is host:port (by default that "
    "of RAY_ADDRESS, or the cluster of this machine), and ARTIFACT or RUN lies at the same path on "
    "every node",
)
@default_option("--port", type=count(0, 65535), default=8500, help="of gRPC; 0: a free one")
@click.option(
    "--http-port",
    type=count(0, 65535),
    metavar="COUNT",
    help="of HTTP; 0: a free one; by default the next one after --port",
)
@default_option(
    "--host",
    default="127.0.0.1",
    metavar="HOST",
    help="address to listen at; the default is reached from this machine alone",
)
@default_option("--threads", type=count(), default=1, help="cores that a replica scores with")
@default_option(
    "--max-batch-rows",
    type=count(),
    default=1024,
    help="rows of waiting requests that are scored in one call at most",
)
@default_option(
    "--queue-rows",
    type=count(),
    default=16384,
    help="rows that may wait in a replica; beyond them requests are refused",
)
@default_option(
    "--lame-duck",
    "lame_duck_s",
    type=click.FloatRange(0),
    default=1.0,
    metavar="SECONDS",
    help="time to answer as before, and say that it is not ready, after SIGTERM",
)
@default_option(
    "--drain",
    "drain_s",
    type=SECONDS,
    default=30.0,
    metavar="SECONDS",
    help="time to answer what is there, after that",
)
def command(
    artifact: str | None,
    follow: str | None,
    poll: float | None,
    in_place: bool,
    untrusted: bool,
    cluster: str | None,
    port: int,
    http_port: int | None,
    **settings: Any,
) -> None:
    """Answer requests for scores until SIGTERM or Ctrl-C.

    gRPC takes Arrow streams (rayrec.serve.Client), HTTP takes JSON at /predict and answers
    /health, /ready and /metrics.
    """
    from rayrec.serve.server.settings import ServerSettings, check_installed

    path = _served(artifact, follow, poll, in_place, cluster)
    check_installed()
    if http_port is None:
        http_port = min(port + 1, 65535) if port else 0
    own = ServerSettings(
        port=port,
        http_port=http_port,
        poll_s=poll or 1.0,
        strict=not in_place,
        trusted=not untrusted,
        **settings,
    )
    if cluster is not None:
        from rayrec.serve.cluster import serve_on_cluster

        serve_on_cluster(path, own, follow=follow is not None, address=cluster)
        return
    from rayrec.serve.server.supervisor import serve

    serve(path, own, follow=follow is not None)


def _served(
    artifact: str | None,
    follow: str | None,
    poll: float | None,
    in_place: bool,
    cluster: str | None,
) -> str:
    """Return the path to serve: that of an artifact, or of a run that publishes."""
    from rayrec.errors import ConfigError

    if artifact is None and follow is None and cluster is not None:
        raise ConfigError(
            f"there is no ARTIFACT, and --cluster takes {cluster!r} as its address; write ARTIFACT "
            "before --cluster."
        )
    if (artifact is None) == (follow is None):
        raise ConfigError(
            "rayrec serve wants ARTIFACT, a folder that rayrec export wrote, or --follow RUN, and "
            "not both."
        )
    for option, is_given in (("--poll", poll is not None), ("--in-place", in_place)):
        if is_given and follow is None:
            raise ConfigError(
                f"{option} has no effect without --follow; give it, too, or leave {option} out."
            )
    path = artifact if follow is None else follow
    assert path is not None, "one of both is given"
    return path
