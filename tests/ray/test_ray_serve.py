"""The Ray Serve deployment answers HTTP and handles as a predictor does, on a real Ray Serve."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from rayrec.errors import ConfigError, InputError
from rayrec.serve import Predictor
from rayrec.serve.ray_serve import application
from rayrec.serve.wire import ARROW_TYPE, read_answer, request_bytes
from tests.unit.serve_worlds import an_artifact, rows
from tests.unit.served_processes import free_ports

JSON_TYPE = "application/json"


class Deployment(NamedTuple):
    predictor: Predictor
    handle: Any
    url: str

    def post(self, body: bytes, kind: str = JSON_TYPE) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url, body, {"content-type": kind})
        try:
            with urllib.request.urlopen(request, timeout=200) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return an_artifact(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def deployed(cluster: None, artifact: Path) -> Iterator[Deployment]:
    serve = pytest.importorskip("ray.serve", reason="needs ray[serve]")
    port = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        handle = serve.run(application(artifact, replicas=2), name="clicks")
        yield Deployment(Predictor.load(artifact), handle, f"http://127.0.0.1:{port}/")
    finally:
        serve.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_http_and_handles_answer_as_the_predictor(deployed: Deployment) -> None:
    for count in (1, 7, 300):
        table = rows(count, count).drop_columns(["click"])
        wanted = deployed.predictor.predict(table).numpy()
        close = {"rtol": 1e-5, "atol": 1e-6}
        (batch,) = table.combine_chunks().to_batches()
        answers = [deployed.handle.ask.remote(batch) for _ in range(5)]
        for answer in answers:
            told = answer.result()
            np.testing.assert_allclose(told.scores, wanted, **close)
            assert told.step == 7 and told.version == deployed.predictor.weights.name
        status, body = deployed.post(json.dumps({"rows": table.to_pylist()}).encode())
        assert status == 200
        np.testing.assert_allclose(json.loads(body)["scores"], wanted, **close)
        status, body = deployed.post(request_bytes(table), ARROW_TYPE)
        assert status == 200
        np.testing.assert_allclose(read_answer(body).scores, wanted, **close)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_requests_are_told_as_by_rayrec_serve(deployed: Deployment) -> None:
    table = rows(3, 5).drop_columns(["click"])
    bad = table.set_column(table.schema.get_field_index("item"), "item", pa.array([1, 60, 2]))
    with pytest.raises(InputError, match=r"feature 'item' \(column 'item'\) holds id 60 in row 1"):
        deployed.handle.ask.remote(bad).result()
    for body, kind, status, says in (
        (json.dumps({"rows": bad.to_pylist()}).encode(), JSON_TYPE, 400, "holds id 60 in row 1"),
        (b"{", JSON_TYPE, 400, "the body is no JSON"),
        (b"", ARROW_TYPE, 400, "the request is empty"),
        (b"user=7", "text/plain", 415, "content-type text/plain is not read"),
        (b" " * (5 << 20), JSON_TYPE, 413, "the body is larger than 4194304 bytes"),
    ):
        code, answer = deployed.post(body, kind)
        told = json.loads(answer)
        assert code == status and told["error"] == "InputError" and says in told["message"]
    assert deployed.post(json.dumps({"rows": table.to_pylist()}).encode())[0] == 200


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ConfigError, match=r"install 'rayrec\[ray-serve\]', or serve by rayrec"):
        application("served/clicks")
    with pytest.raises(ConfigError, match="threads"):
        application("served/clicks", threads=0)
