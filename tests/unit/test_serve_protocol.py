"""A server answers what deploy/serving says, asked by clients that know nothing of rayrec."""

from __future__ import annotations

import json
import math
import random
import re

import grpc
import jsonschema
import numpy as np
import pyarrow as pa
import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from rayrec import errors
from rayrec.errors import InputError
from rayrec.next_item_recipe import NextItemModel
from rayrec.serve import Predictor, export
from rayrec.serve.protobuf import fields_of, message, numbers_of
from rayrec.serve.server.body import _TYPES, JSON_TYPE, written
from rayrec.serve.server.faults import _KINDS
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.server.untrusted import _MOST_BATCHES
from rayrec.serve.wire import Answer, request_bytes
from tests.unit.documents import ROOT
from tests.unit.next_item_worlds import ITEMS, next_item_world, random_rows
from tests.unit.running_replica import running
from tests.unit.serve_worlds import an_artifact, rows

SAID = (ROOT / "deploy/serving/serving.proto").read_text()
API = yaml.safe_load((ROOT / "deploy/serving/openapi.yaml").read_text())
USER = ["user", "age", "seen"]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # a product of matrices depends on their size in its last bits


def messages_of(text: str) -> dict[str, type]:
    """The messages of a .proto file, with fields of some plain types, as protobuf's own classes."""
    plain = re.sub(r"//.*", "", text)
    package = re.search(r"package (\w+);", plain)[1]
    file = descriptor_pb2.FileDescriptorProto(name="said.proto", package=package, syntax="proto3")
    for name, body in re.findall(r"message (\w+) \{([^}]*)\}", plain):
        kind = file.message_type.add(name=name)
        fields = re.findall(r"(bytes|uint32|bool) (\w+) = (\d+);", body)
        assert fields and body.count(";") == len(fields), "only these types are read here"
        for word, field, number in fields:
            code = {"bool": 8, "bytes": 12, "uint32": 13}[word]
            kind.field.add(name=field, number=int(number), type=code, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [f"{package}.{kind.name}" for kind in file.message_type]
    found = [pool.FindMessageTypeByName(name) for name in names]
    return {kind.name: message_factory.GetMessageClass(kind) for kind in found}


MESSAGES = messages_of(SAID)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory) -> Predictor:
    return Predictor.load(an_artifact(tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def server(predictor):
    with running(predictor, queue_rows=400) as one:
        yield one


@pytest.fixture(scope="module")
def asked() -> pa.Table:
    return rows(20, 5).drop_columns(["click"])


def stream(data: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write(data)
    return sink.getvalue().to_pybytes()


def table(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


def sides(asked: pa.Table) -> tuple[pa.Table, pa.Table, pa.Table]:
    """One user, candidates without its columns, and both beside each other."""
    user, candidates = asked[3:4].select(USER), asked.drop_columns(USER)
    whole = candidates
    for name in USER:
        whole = whole.append_column(name, pa.concat_tables([user] * len(asked))[name])
    return user, candidates, whole


def test_a_client_made_of_the_proto_file_is_answered(server, predictor, asked):
    service = re.search(r"service (\w+) \{\s*[^{]*?rpc (\w+)\((\w+)\) returns \((\w+)\);", SAID)
    path = f"/rayrec.{service[1]}/{service[2]}"
    request, response = MESSAGES[service[3]], MESSAGES[service[4]]
    user, candidates, whole = sides(asked)
    with grpc.insecure_channel(server.address) as channel:
        score = channel.unary_unary(
            path,
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        for given, same in (
            (request(rows=stream(asked)), asked),
            (request(rows=stream(candidates), user=stream(user)), whole),
            (request(rows=stream(candidates[:0]), user=stream(user)), whole[:0]),
        ):
            got = table(score(given, timeout=200).scores)
            assert got.column_names == ["score"] and got["score"].type == pa.float32()
            np.testing.assert_allclose(got["score"], predictor.predict(same), **CLOSE)
            said = got.schema.metadata
            assert {name.decode() for name in said} == set(
                re.findall(r"rayrec\.[a-z]+(?=  )", SAID)
            )
            assert json.loads(said[b"rayrec.tasks"]) == [""] and int(said[b"rayrec.step"]) == 7
        for given, says in (
            (request(), "the request is empty"),
            (request(rows=stream(candidates), user=stream(asked[:2].select(USER))), "2 rows"),
            (request(rows=stream(asked), user=stream(user)), "is in the user's row and in the"),
            (request(rows=stream(candidates.drop_columns(["item"])), user=stream(user)), "'item'"),
        ):
            with pytest.raises(grpc.RpcError, match=says) as caught:
                score(given, timeout=200)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_numbers_of_the_files_are_those_of_the_server():
    own, text = ServerSettings(), " ".join(SAID.replace("//", "").split())
    assert f"At most {own.max_rows} rows, {_MOST_BATCHES} record batches and 4 MiB" in text
    assert own.max_bytes == 4 << 20
    codes = {code for _, code, _ in _KINDS.values()} | {"INTERNAL", "CANCELLED"}
    assert set(re.findall(r"[A-Z]{2,}_?[A-Z]{3,}", SAID)) == codes
    post = API["paths"]["/predict"]["post"]
    assert post["requestBody"]["description"] == f"At most 4 MiB and {own.max_rows} rows."
    assert set(post["requestBody"]["content"]) == set(post["responses"]["200"]["content"])
    assert set(post["requestBody"]["content"]) == set(_TYPES)
    statuses = {str(status) for _, _, status in _KINDS.values()} | {"200", "413", "415", "500"}
    assert set(post["responses"]) == statuses
    named = API["components"]["schemas"]["Error"]["properties"]["error"]["enum"]
    own = {kind.__name__ for kind in _KINDS} | {"ServingError"}
    assert set(named) == own | {"NotFound", "MethodNotAllowed"}
    assert all(hasattr(errors, name) for name in own)


def check(value: object, place: str) -> None:
    """Compare a value with a schema of the document."""
    registry = Registry().with_resource(
        "urn:api", Resource(contents=API, specification=DRAFT202012)
    )
    # what Python's parser takes, and JSON does not
    json.dumps(value, allow_nan=False)
    schema = {"$ref": f"urn:api#/{place}"}
    jsonschema.Draft202012Validator(schema, registry=registry).validate(value)


def test_http_answers_what_its_document_says(server, predictor, asked):
    user, candidates, whole = sides(asked)
    one = user.to_pylist()[0]
    bodies = [
        ({"columns": asked.to_pydict()}, asked),
        ({"rows": asked.to_pylist(), "timeout_ms": 200_000}, asked),
        ({"columns": candidates.to_pydict(), "user": one}, whole),
        ({"rows": candidates.to_pylist(), "user": one}, whole),
    ]
    for body, same in bodies:
        check(body, "components/schemas/Request")
        status, said, _ = server.http("/predict", body)
        assert status == 200, said
        check(said, "components/schemas/Answer")
        np.testing.assert_allclose(said["scores"], predictor.predict(same), **CLOSE)
    for kind, body in (
        ("application/vnd.apache.arrow.stream", stream(asked)),
        (
            "application/x-protobuf",
            MESSAGES["ScoreRequest"](rows=stream(asked)).SerializeToString(),
        ),
    ):
        status, said, headers = server.http("/predict", body, kind)
        assert status == 200 and headers["content-type"] == kind
        scores = said if "arrow" in kind else MESSAGES["ScoreResponse"].FromString(said).scores
        np.testing.assert_allclose(table(scores)["score"], predictor.predict(asked), **CLOSE)
    for body, kind, status in (
        ({"rows": 5}, "application/json", 400),
        ({"rows": asked.to_pylist(), "user": one}, "application/json", 400),
        (b"x", "text/plain", 415),
        (None, "application/json", 405),
    ):
        got, said, _ = server.http("/predict", body, kind)
        assert got == status
        check(said, "components/schemas/Error")
    status, said, _ = server.http("/nothing")
    assert status == 404
    check(said, "components/schemas/Error")
    for bad in ({"rows": 5}, {}, {"rows": [], "columns": {}}, {"rows": [], "timeout_ms": 0}):
        with pytest.raises(jsonschema.ValidationError):
            check(bad, "components/schemas/Request")
    for path, what in API["paths"].items():
        if "get" in what:
            status, said, headers = server.http(path)
            (kind, wanted), *_ = what["get"]["responses"]["200"]["content"].items()
            assert status == 200 and headers["content-type"].startswith(kind)
            if kind == "application/json":
                check(said, wanted["schema"]["$ref"].removeprefix("#/"))


def test_lists_of_the_best_items_are_what_both_documents_say(tmp_path):
    model = NextItemModel(model="sasrec", ks=(4,))
    export(next_item_world(tmp_path, 1, model).checkpoint, tmp_path / "out", types="fp32")
    own = Predictor.load(tmp_path / "out")
    histories = [{"history": row["history"]} for row in random_rows(1)]
    request, response = MESSAGES["ScoreRequest"], MESSAGES["ScoreResponse"]
    with running(own) as server:
        for options in ({}, {"k": 2}, {"masked": True}, {"k": ITEMS, "masked": True}):
            wanted = own.predict_top(histories, **options)
            body = {"rows": histories, **options}
            check(body, "components/schemas/Request")
            status, said, _ = server.http("/predict", body)
            assert status == 200, said
            check(said, "components/schemas/Answer")
            assert said["scores"]["item"] == wanted["item"].tolist()
            sent = request(rows=stream(pa.Table.from_pylist(histories)), **options)
            _, said, _ = server.http("/predict", sent.SerializeToString(), "application/x-protobuf")
            got = table(response.FromString(said).scores)
            assert got["item"].to_pylist() == wanted["item"].tolist()
            assert got.schema.types == [
                pa.list_(kind, wanted["item"].shape[1]) for kind in (pa.int64(), pa.float32())
            ]
            np.testing.assert_allclose(got["score"].to_pylist(), wanted["score"], **CLOSE)
    for bad in ({"rows": [], "k": 0}, {"rows": [], "k": 1.5}, {"rows": [], "masked": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check(bad, "components/schemas/Request")


def test_a_score_that_is_no_number_is_null_in_json(server, predictor, asked):
    """Parsers of other languages refuse the whole of an answer with NaN, as JSON does."""
    columns = asked.to_pydict()
    columns["age"][3] = columns["price"][3] = -3e38
    wanted = predictor.predict(pa.table(columns, asked.schema)).tolist()
    assert [number for number, score in enumerate(wanted) if not math.isfinite(score)] == [3]
    status, said, _ = server.http("/predict", {"columns": columns})
    check(said, "components/schemas/Answer")
    assert status == 200 and said["scores"].pop(3) is None
    np.testing.assert_allclose(said["scores"], wanted[:3] + wanted[4:], **CLOSE)
    several = {"a": np.array([[0.5, np.inf]], np.float32), "b": np.array([np.nan], np.float32)}
    body = json.loads(written(Answer(several, "v", 1), JSON_TYPE))
    check(body, "components/schemas/Answer")
    assert not {"event_time", "ingest_time"} & set(body)
    body = json.loads(written(Answer(several, "v", 1, 1_800_000_000, 1.8e9 + 0.125), JSON_TYPE))
    check(body, "components/schemas/Answer")
    assert (body["event_time"], body["ingest_time"]) == (1_800_000_000, 1.8e9 + 0.125)
    assert body["scores"] == {"a": [[0.5, None]], "b": [None]}


def test_the_client_and_the_predictor_score_candidates_alike(server, predictor, asked):
    user, candidates, whole = sides(asked)
    wanted = predictor.predict(whole)
    with server.client() as client:
        for one in (user, user.to_pylist()[0]):
            scores = client.predict_candidates(one, candidates)
            np.testing.assert_allclose(scores, wanted, **CLOSE)
        with pytest.raises(InputError, match="'age' is in the user's row and in the candidates"):
            client.predict_candidates(user, asked)


STATUS = {"SERVING": b"\x08\x01", "NOT_SERVING": b"\x08\x02", "SERVICE_UNKNOWN": b"\x08\x03"}


def test_a_replica_that_ends_says_so_and_answers(predictor, asked):
    """While it is a lame duck: not ready by gRPC and HTTP, and all requests are answered."""
    check_path, watch_path = ("/grpc.health.v1.Health/" + name for name in ("Check", "Watch"))
    names = (b"", b"\x0a\x0erayrec.Serving")

    with running(predictor) as server, grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(check_path)
        assert [ask(name, timeout=200) for name in names] == [STATUS["SERVING"]] * 2
        for name, code in ((b"\x0a\x01x", "NOT_FOUND"), (b"\xff", "INVALID_ARGUMENT")):
            with pytest.raises(grpc.RpcError) as caught:
                ask(name, timeout=200)
            assert caught.value.code().name == code
        body = {"columns": asked.to_pydict()}
        assert "connection" not in server.http("/predict", body)[2]
        watches = [channel.unary_stream(watch_path)(name, timeout=200) for name in names]
        assert [next(watch) for watch in watches] == [STATUS["SERVING"]] * 2
        (unknown,) = channel.unary_stream(watch_path)(b"\x0a\x01x", timeout=200)
        assert unknown == STATUS["SERVICE_UNKNOWN"]
        server.loop.call_soon_threadsafe(server.replica.health.set_ready, False)
        assert [list(watch) for watch in watches] == [[STATUS["NOT_SERVING"]]] * 2
        assert ask(b"", timeout=200) == STATUS["NOT_SERVING"]
        assert server.http("/ready")[:2] == (
            503,
            {"error": "UnavailableError", "message": "the replica is about to end."},
        )
        wanted = predictor.predict(asked)
        status, said, headers = server.http("/predict", body)
        assert (status, headers["connection"]) == (200, "close")
        np.testing.assert_allclose(said["scores"], wanted, **CLOSE)
        with server.client() as client:
            np.testing.assert_allclose(client.predict(asked), wanted, **CLOSE)


@pytest.mark.seeds(range(20))
def test_messages_are_those_of_protobuf(seed):
    rng = random.Random(seed)
    parts = {name: rng.randbytes(rng.choice([0, 1, 127, 128, 20_000])) for name in ("rows", "user")}
    whole = MESSAGES["ScoreRequest"](**parts).SerializeToString()
    assert message({1: parts["rows"], 2: parts["user"]}) == whole
    assert fields_of(whole) == {n: part for n, part in enumerate(parts.values(), 1) if part}
    numbers = {"k": rng.choice([0, 1, 300, 2**32 - 1]), "masked": rng.random() < 0.5}
    sent = {1: parts["rows"], 2: parts["user"], 3: numbers["k"], 4: int(numbers["masked"])}
    own = MESSAGES["ScoreRequest"](**parts, **numbers).SerializeToString()
    assert message(sent) == own
    assert numbers_of(own) == {n: sent[n] for n in (3, 4) if sent[n]}
    # fields that are not known, of all kinds
    other = b"\x18\xff\xff\x03" + b"\x21" + b"8" * 8 + b"\x2d4444" + b"\x32\x01x"
    assert fields_of(other + whole + other) == {**fields_of(whole), 6: b"x"}
    for _ in range(20):
        cut = bytearray(whole[: rng.randrange(len(whole) + 1)])
        if cut:
            cut[rng.randrange(min(8, len(cut)))] = rng.randrange(256)
        try:
            fields_of(bytes(cut))
        except InputError as error:
            assert "no protobuf message at byte" in str(error)


def test_a_user_that_is_repeated_too_often_is_refused(predictor, asked, monkeypatch):
    """Where the model needs the user's columns beside each candidate, and only there."""
    user, candidates, whole = sides(asked)
    large = user.set_column(2, "seen", pa.array([[1] * 1_000_000]))
    assert len(predictor.predict_candidates(large, candidates)) == len(candidates)
    monkeypatch.setattr(predictor.requests, "_once", None)
    scores = predictor.predict_candidates(user, candidates)
    np.testing.assert_allclose(scores, predictor.predict(whole), **CLOSE)
    assert predictor.predict_candidates(user, []).shape == (0,)
    with pytest.raises(InputError, match=r"has 80\d+ bytes, and this model needs it beside each"):
        predictor.predict_candidates(large, candidates)
    assert len(request_bytes(large)) > 8_000_000
