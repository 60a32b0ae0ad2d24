"""A server beside the predictor that it serves, and beside the same predictor in Ray Serve.

    python -m benchmarks.serving --server [--seconds 4] [--cap 100000]

Every side is sent the same Arrow streams of raw columns and answers with one of scores. A closed
loop of 16 clients in one process asks without a pause; "half load" sends at half the rate that a
side has reached there, and its latencies are those of requests that mostly find nobody waiting.
"predictor" reads and scores the same streams in one thread, without a server. Server and clients
share the cores of this machine. Ray Serve (HTTP, one replica, `max_ongoing_requests` 64) is there
where `ray.serve` can be imported.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks import report
from benchmarks.serving import saved, schema_of, zipf_ids
from rayrec.layout.schema import FeatureSchema
from rayrec.serve import Answer, ParityBounds, Predictor, export
from rayrec.serve.server.untrusted import RequestReader
from rayrec.serve.wire import ARROW_TYPE, METHOD, SERVICE, answer_bytes, request_bytes

Ask = Callable[[bytes], Awaitable[bytes]]
ROWS, CLIENTS = (1, 512), 16
SIDES = "predictor", "rayrec serve", "Ray Serve"


def requests_of(schema: FeatureSchema, ids: Sequence[torch.Tensor], rows: int) -> list[bytes]:
    """Requests of so many rows, one of each of the batches of (features * rows,) ids."""
    requests = []
    for batch in ids:
        columns = batch.view(len(schema.features), rows).numpy()
        parts = {f.column: column for f, column in zip(schema.features, columns, strict=True)}
        dense = np.random.default_rng(0).normal(size=(len(schema.dense), rows))
        parts |= {c.column: dense[at].astype("f4") for at, c in enumerate(schema.dense)}
        requests.append(request_bytes(pa.record_batch(parts)))
    return requests


def alone(predictor: Predictor) -> Callable[[bytes], bytes]:
    """What a server does for one request, without a server."""
    assert predictor.schema is not None
    reader, version = (
        RequestReader(predictor.schema.columns(with_labels=False), 1 << 20),
        (predictor.weights.name, predictor.weights.step),
    )

    def answer(message: bytes) -> bytes:
        scores = predictor.predict(reader.read(message))
        assert isinstance(scores, torch.Tensor)
        return answer_bytes(Answer(scores.numpy(), *version))

    return answer


@asynccontextmanager
async def rayrec_serve(artifact: Path) -> AsyncIterator[Ask]:
    """A server of one replica in a process of its own."""
    import grpc.aio

    command = [sys.executable, "-m", "rayrec.cli.main", "serve", str(artifact), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        said = re.search(r"gRPC at (\S+),", line)
        assert said, line
        async with grpc.aio.insecure_channel(said[1]) as channel:
            yield channel.unary_unary(f"/{SERVICE}/{METHOD}")
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def ray_serve(artifact: Path) -> AsyncIterator[Ask]:
    """A Ray Serve deployment of the predictor behind HTTP."""
    import aiohttp
    import ray
    from ray import serve
    from starlette.responses import Response

    @serve.deployment(max_ongoing_requests=64, ray_actor_options={"num_cpus": 1})
    class Deployed:
        def __init__(self, path: str) -> None:
            torch.set_num_threads(1)
            self.answer = alone(Predictor.load(path))

        async def __call__(self, request: Any) -> Response:
            return Response(self.answer(await request.body()), media_type=ARROW_TYPE)

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8765})
        serve.run(Deployed.bind(str(artifact)))
        async with aiohttp.ClientSession() as session:

            async def ask(message: bytes) -> bytes:
                async with session.post("http://127.0.0.1:8765/", data=message) as response:
                    assert response.status == 200, await response.text()
                    return await response.read()

            yield ask
    finally:
        serve.shutdown()
        ray.shutdown()


def has_ray_serve() -> bool:
    """Whether Ray Serve and all that it needs is installed."""
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        return False
    return True


async def closed_loop(ask: Ask, messages: Sequence[bytes], seconds: float) -> dict[str, float]:
    """Requests per second and milliseconds of clients that ask without a pause."""
    took: list[float] = []
    given, end = cycle(messages), time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            start = time.perf_counter()
            await ask(next(given))
            took.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return {"per_s": len(took) / (time.perf_counter() - start), **_quantiles(took)}


async def half_load(
    ask: Ask, messages: Sequence[bytes], per_s: float, seconds: float
) -> dict[str, float]:
    """Milliseconds of requests that are sent at random moments, at so many a second."""
    took: list[float] = []
    rng, asked = np.random.default_rng(0), []

    async def one(message: bytes, due: float) -> None:
        await ask(message)
        # from the moment at which it was to be sent, so that a late sender hides no wait
        took.append(time.perf_counter() - due)

    due = time.perf_counter()
    end = due + seconds
    for message in cycle(messages):
        due += rng.exponential(1 / per_s)
        if due > end:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asked.append(asyncio.create_task(one(message, due)))
    await asyncio.gather(*asked)
    return {"per_s": per_s, **_quantiles(took)}


def _quantiles(took: list[float]) -> dict[str, float]:
    p50, p99 = np.quantile(took, [0.5, 0.99]) * 1000 if took else (0.0, 0.0)
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


async def measure(artifact: Path, messages: dict[int, list[bytes]], seconds: float) -> dict:
    """Numbers by side, rows and load; sides take turns."""
    answer = alone(Predictor.load(artifact))

    async def in_this_process(message: bytes) -> bytes:
        return answer(message)

    results: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as opened:
        sides: dict[str, Ask] = {SIDES[0]: in_this_process}
        sides[SIDES[1]] = await opened.enter_async_context(rayrec_serve(artifact))
        if has_ray_serve():
            sides[SIDES[2]] = await opened.enter_async_context(ray_serve(artifact))
        for rows in ROWS:
            for ask in sides.values():
                await closed_loop(ask, messages[rows], 0.5)
            for name, ask in sides.items():
                own = await closed_loop(ask, messages[rows], seconds)
                results[f"{name}, {rows} rows, closed loop"] = own
            for name, ask in list(sides.items())[1:]:
                rate = results[f"{name}, {rows} rows, closed loop"]["per_s"] / 2
                own = await half_load(ask, messages[rows], rate, seconds)
                results[f"{name}, {rows} rows, half load"] = own
    return results


def table(results: dict[str, dict[str, float]]) -> list[str]:
    """The numbers as lines of Markdown, with what each side reaches beside the others."""
    lines = ["| side | requests/s | p50 ms | p99 ms | p99 / p50 |", "|---|---|---|---|---|"]
    for name, own in results.items():
        ratio = own["p99_ms"] / max(own["p50_ms"], 1e-9)
        lines.append(
            f"| {name} | {own['per_s']:.0f} | {own['p50_ms']:.2f} | {own['p99_ms']:.2f} | "
            f"{ratio:.1f}x |"
        )
    for rows in ROWS:
        own = results[f"{SIDES[1]}, {rows} rows, closed loop"]["per_s"]
        for other in (SIDES[0], SIDES[2]):
            beside = results.get(f"{other}, {rows} rows, closed loop")
            if beside is not None:
                ratio = own / beside["per_s"]
                lines.append(f"| {SIDES[1]} beside {other}, {rows} rows | {ratio:.2f}x | | | |")
    if not has_ray_serve():
        lines += ["", "ray.serve cannot be imported here, so that side is left out."]
    return lines


def run(cap: int, seconds: float) -> None:
    """Load a server of INT8 tables, print and write."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    schema = schema_of(cap)
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        artifact = Path(folder, "artifact")
        checkpoint = saved(Path(folder, "checkpoint"), schema)
        export(checkpoint, artifact, types="int8", bounds=ParityBounds(logit=100, auc=1, ne=1))
        messages = {}
        for rows in ROWS:
            messages[rows] = requests_of(schema, zipf_ids(schema, rows, 64), rows)
        results = asyncio.run(measure(artifact, messages, seconds))
    lines = [*table(results), ""]
    lines.append(
        f"Closed loops of {CLIENTS} clients, {seconds:g} s each. Tables of at most "
        f"{cap:,} rows, INT8. The load average was {load:.1f} before and {os.getloadavg()[0]:.1f} "
        "after."
    )
    report.show("serving-server", {**results, "load average": {"before": load}}, lines)
