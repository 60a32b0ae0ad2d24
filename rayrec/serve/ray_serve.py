"""A Ray Serve deployment of a predictor, for users who want the routing of Ray Serve.

    handle = ray.serve.run(application("served/clicks"))

HTTP takes and answers what /predict of `rayrec serve` does, and `handle.ask.remote(rows)` takes
Arrow batches. docs/serving.md has the price of it. Needs ray[serve].
"""

from __future__ import annotations

import os
from threading import Event
from typing import Any

from rayrec.errors import ConfigError, InputError, ServingError
from rayrec.serve.artifact import local_folder
from rayrec.serve.server.answering import Answering
from rayrec.serve.server.faults import ErrorReply
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.served import served_predictor
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.wire import ARROW_TYPE, Answer, Columns, request_bytes
from rayrec.storage import one_line


def application(
    artifact: str | os.PathLike[str],
    *,
    replicas: int = 1,
    threads: int = 1,
    trusted: bool = True,
    signing_key: str | None = None,
    **options: Any,
) -> Any:
    """Return a predictor as an application for `ray.serve.run`.

    Args:
        artifact: folder that `rayrec export` wrote, at the same path on every node.
        replicas, threads: number of Ray Serve actors, and CPUs of each.
        trusted, signing_key: the arguments of `Predictor.load`; every node has the key there.
        options: further options of `ray.serve.deployment`, which override these.
    Raises:
        ConfigError: a number is out of range, or ray[serve] is not installed.
    """
    settings = ServerSettings(
        replicas=replicas, threads=threads, trusted=trusted, signing_key=signing_key
    )
    folder = str(local_folder("the artifact", artifact))
    try:
        import ray.serve
    except ImportError as error:
        raise ConfigError(
            f"Ray Serve is not installed: {one_line(error)} Install it with pip install "
            "'rayrec[ray-serve]', or serve by rayrec serve, which does not need it."
        ) from None
    # Ray Serve gives a replica 5 requests at a time by itself, which are too few to be joined.
    given = {"name": "rayrec", "num_replicas": replicas, "max_ongoing_requests": 256}
    given |= {"ray_actor_options": {"num_cpus": threads}, **options}
    return ray.serve.deployment(**given)(ServeReplica).bind(folder, settings)


class ServeReplica:
    """Replica as Ray Serve deploys it; made inside of a running event loop."""

    def __init__(self, artifact: str, settings: ServerSettings) -> None:
        import torch

        torch.set_num_threads(settings.threads)
        predictor = served_predictor(artifact, settings)
        predictor.warm()
        self._most_bytes, self._broken = settings.max_bytes, Event()
        metrics = Metrics(predictor.weights.name)
        self._answering = Answering(predictor, settings, metrics, self._broken.set)

    async def __call__(self, request: Any) -> Any:
        """Answer HTTP as /predict of `rayrec serve` does."""
        from starlette.responses import JSONResponse, Response

        kind = request.headers.get("content-type", "").partition(";")[0]
        body = await request.body()
        if len(body) > self._most_bytes:
            trouble = f"the body is larger than {self._most_bytes} bytes."
            return JSONResponse({"error": InputError.__name__, "message": trouble}, 413)
        answer = await self._answering.answer("http", kind, body)
        if isinstance(answer, ErrorReply):
            return JSONResponse({"error": answer.error, "message": answer.text}, answer.status)
        return Response(answer, media_type=kind)

    async def ask(self, rows: Columns, timeout_s: float | None = None) -> Answer:
        """Answer a handle, as `rayrec.serve.Client.ask`; without `timeout_s` it waits for ever."""
        return await self._answering.score(ARROW_TYPE, request_bytes(rows), timeout_s)

    def check_health(self) -> None:
        """Raise an error if Ray Serve shall start another replica in place of this one."""
        if self._broken.is_set():
            raise ServingError("the scoring thread has ended; the log has the traceback.")
