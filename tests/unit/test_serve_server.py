"""A replica answers as its predictor does, refuses what it cannot take, and loses no request."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pyarrow as pa
import pytest

from rayrec.errors import (
    ConfigError,
    DeadlineError,
    InputError,
    OverloadedError,
    ServingError,
    UnavailableError,
)
from rayrec.serve import Client, export
from rayrec.serve.server import answering, scoring_queue, settings
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.wire import (
    ARROW_TYPE,
    METHOD,
    SERVICE,
    Answer,
    answer_bytes,
    read_answer,
    request_bytes,
)
from tests.unit.bad_requests import in_batches, mutated, sharing, streams, with_delta
from tests.unit.running_replica import HeldPredictor, running
from tests.unit.serve_worlds import a_world, rows

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # a product of matrices depends on their size in its last bits


@pytest.fixture(scope="module")
def predictor(tmp_path_factory) -> HeldPredictor:
    folder = tmp_path_factory.mktemp("served")
    world = a_world(folder)
    export(world.checkpoint, folder / "artifact", types="fp32", data=world.data)
    return HeldPredictor.load(folder / "artifact")


@pytest.fixture(scope="module")
def server(predictor):
    with running(predictor, max_bytes=1 << 16, max_rows=500, queue_rows=400) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with server.client() as one:
        yield one


@pytest.fixture(scope="module")
def asked() -> pa.Table:
    return rows(20, 5).drop_columns(["click"])


def test_every_form_of_rows_has_the_predictors_scores(server, client, predictor, asked):
    wanted = predictor.predict(asked).numpy()
    columns = asked.to_pydict()
    arrays = {**columns, "item": np.array(columns["item"]), "price": asked["price"]}
    for given in (asked, asked.to_batches()[0], asked.to_pylist(), columns, arrays):
        scores = client.predict(given)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, wanted, **CLOSE)
    answer = client.ask(asked)
    assert answer.step == 7 and answer.version == f"7-{predictor.manifest.sha256[:12]}"
    for body in ({"columns": columns}, {"rows": asked.to_pylist(), "timeout_ms": 200_000}):
        status, said, _ = server.http("/predict", body)
        assert status == 200 and (said["version"], said["step"]) == (answer.version, 7)
        np.testing.assert_allclose(said["scores"], wanted, **CLOSE)
    assert server.http("/health")[1]["status"] == "alive"
    assert server.http("/ready")[1] == {"status": "ready", "version": answer.version}
    kind = "application/vnd.apache.arrow.stream"
    status, content, headers = server.http("/predict", request_bytes(asked), kind)
    assert status == 200 and headers["content-type"] == kind
    np.testing.assert_allclose(read_answer(content).scores, wanted, **CLOSE)
    assert (
        client.predict(asked[:0]).shape == client.predict(asked.to_batches()[0][:0]).shape == (0,)
    )


def test_answers_of_several_tasks_keep_names_and_shapes():
    scores = {"buy": np.float32([0.5, 1]), "kind": np.float32([[1, 0, 0], [0.2, 0.3, 0.5]])}
    for told in (("7-ab", 7, None, None), ("7-ab", 7, 1_800_000_000, 1.8e9 + 0.125)):
        again = read_answer(answer_bytes(Answer(scores, *told)))
        assert list(again.scores) == ["buy", "kind"] and again[1:] == told
    for name, values in scores.items():
        assert again.scores[name].dtype == np.float32
        np.testing.assert_array_equal(again.scores[name], values)
    for damaged in (b"", b"abc", request_bytes({"a": [1]})):
        with pytest.raises(ServingError, match="no stream of scores"):
            read_answer(damaged)


BAD = {
    "a missing column": lambda t: t.drop_columns(["item"]),
    "an id beyond its table": lambda t: _with(t, "item", 3, 60),
    "a negative id": lambda t: _with(t, "item", 3, -1),
    "a NaN": lambda t: _with(t, "price", 2, float("nan")),
    "text for a number": lambda t: _put(t, "price", ["x"] * len(t)),
    "text for ids": lambda t: _put(t, "item", ["x"] * len(t)),
    "a null in a list": lambda t: _put(t, "seen", [[1, None]] * len(t)),
    "a column twice": lambda t: t.append_column("item", t["item"]),
}


def _put(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))


def _with(table, name, row, value):
    values = table[name].to_pylist()
    values[row] = value
    return _put(table, name, values)


@pytest.mark.parametrize("what", BAD)
def test_bad_rows_have_the_predictors_error(server, client, predictor, asked, what):
    bad = BAD[what](asked)
    with pytest.raises(InputError) as wanted:
        predictor.predict(bad)
    with pytest.raises(InputError) as caught:
        client.predict(bad)
    # the server keeps the columns of the schema, so a list of all columns is another one
    start = str(wanted.value).split("; the columns are")[0]
    assert str(caught.value).startswith(start) and "\n" not in str(caught.value)
    if what != "a column twice":
        status, said, _ = server.http("/predict", {"columns": bad.to_pydict()})
        assert (status, said["error"]) == (400, "InputError") and said["message"].startswith(start)


def test_rows_that_are_none_are_told_by_the_client(client):
    for given, says in [
        ("abc", "is of str"),
        (7, "is of int"),
        ([{"a": 1}, 5], "row 1 of the request is of int"),
        ([{"a": 1}, {"b": 1}], "row 1 of the request has no 'a', which other rows have"),
        ({"a": [1], "b": [1, 2]}, "column 'b' of the request has 2 values and column 'a' has 1"),
        ({"a": "xyz"}, "column 'a' of the request is of str"),
        ({"a": [1, "x"]}, "column 'a' of the request holds values of several types"),
        ({"\ud800": [1]}, r"column '\\ud800' of the request has no name of text that UTF-8"),
        ({5: [1]}, "column 5 of the request has no name"),
        ({"a": ["\ud800"]}, "surrogates not allowed"),
        ({"a": [nested(90)]}, "cannot be written as an Arrow stream: Max recursion depth"),
    ]:
        with pytest.raises(InputError, match=says):
            client.predict(given)


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def test_what_http_cannot_take_is_said_in_json(server, asked):
    text = "text/plain"
    for path, body, kind, method, status, says in [
        ("/predict", b"{}", text, "POST", 415, "text/plain is not read; send application/json"),
        ("/predict", b"", "application/json", "POST", 400, "no JSON"),
        ("/predict", b"{", "application/json", "POST", 400, "no JSON"),
        ("/predict", b"[" * 50_000, "application/json", "POST", 400, "no JSON"),
        ("/predict", [1], "application/json", "POST", 400, "a JSON list; send an object"),
        ("/predict", {}, "application/json", "POST", 400, "give one of"),
        ("/predict", {"rows": 5}, "application/json", "POST", 400, "give one of"),
        ("/predict", {"rows": [5]}, "application/json", "POST", 400, "row 0 of the request is of"),
        ("/predict", {"columns": {"item": 5}}, "application/json", "POST", 400, "is of int"),
        ("/predict", {"columns": {"item": [nested(90)]}}, "application/json", "POST", 400, "Max"),
        ("/predict", {"columns": {"\ud800": [1]}}, "application/json", "POST", 400, "has none of"),
        (
            "/predict",
            {"rows": [], "user": 5},
            "application/json",
            "POST",
            400,
            "the user is a JSON",
        ),
        ("/predict", {"rows": [{}] * 600}, "application/json", "POST", 400, "at most 500"),
        ("/predict", b"\x0a\xff", "application/x-protobuf", "POST", 400, "no protobuf message"),
        ("/predict", {"rows": [], "timeout_ms": -1}, "application/json", "POST", 400, "above 0"),
        ("/predict", {"rows": [], "timeout_ms": "x"}, "application/json", "POST", 400, "a number"),
        ("/predict", {"timeout_ms": 10**400}, "application/json", "POST", 400, "a finite number"),
        ("/predict", b" " * 70_000, "application/json", "POST", 413, "65536"),
        ("/predict", None, text, "GET", 405, "GET /predict is not answered; there are POST /pre"),
        ("/nothing", None, text, "GET", 404, "GET /nothing is not answered; there are POST /pred"),
    ]:
        got, said, _ = server.http(path, body, kind, method)
        assert (got, set(said)) == (status, {"error", "message"}), said
        of_http = {404: ["NotFound"], 405: ["MethodNotAllowed"]}
        assert said["error"] in of_http.get(status, ["InputError", "ConfigError"])
        assert says in said["message"] and "\n" not in said["message"], said


def test_rows_without_a_column_of_the_model_are_an_error_that_names_its_columns(
    server, client, asked
):
    """Also the candidates of a user, who were none then, and got no scores."""
    user, candidates = {"age": 1.0}, asked.drop_columns(["age"])
    typo = {"itme": [1, 2]}
    names = "none of the columns 'age', 'price', 'user', 'item', 'seen', 'words'; give them"
    for whose, body in [
        ("request", {"rows": []}),
        ("request", {"columns": {}}),
        ("request", {"rows": [{}]}),
        ("request", {"columns": typo}),
        ("request", {"columns": typo, "user": user}),
        ("request", {"rows": [{"itme": 1}], "user": user}),
        ("user's row", {"rows": candidates.to_pylist(), "user": {"agee": 1.0}}),
    ]:
        status, said, _ = server.http("/predict", body)
        assert (status, said["error"]) == (400, "InputError"), body
        assert said["message"].startswith(f"the {whose} has {names}"), said
    for ask in (
        lambda: client.predict(typo),
        lambda: client.predict_candidates(user, typo),
        lambda: client.predict_candidates({"agee": 1.0}, candidates),
    ):
        with pytest.raises(InputError, match=names):
            ask()
    for none in ({"rows": [], "user": user}, {"columns": {}, "user": user}):
        assert server.http("/predict", none)[1]["scores"] == []
    assert client.predict_candidates(user, []).shape == (0,)


def test_too_large_a_request_is_refused(client, asked):
    with pytest.raises(InputError, match=r"too large: .* larger than max \(\d+ vs. 65536\)"):
        client.predict({"item": np.zeros(9000, np.int64)})
    with pytest.raises(InputError, match="has 501 rows and at most 500 are taken"):
        client.predict({"item": np.zeros(501, np.int8)})


def ask_bytes(channel: grpc.Channel, data: bytes) -> str:
    """OK, or the name of the status code and the text, of raw bytes."""
    try:
        read_answer(channel.unary_unary(f"/{SERVICE}/{METHOD}")(data, timeout=200))
        return "OK"
    except grpc.RpcError as error:
        assert error.details() and "\n" not in error.details(), data
        return f"{error.code().name}: {error.details()}"


def of_nulls(count: int) -> pa.Array:
    """Nulls without a byte of memory."""
    return pa.Array.from_buffers(pa.null(), count, [None])


def viewed(starts: list[int], sizes: list[int], count: int) -> bytes:
    """A column of lists that are views of so many zeros."""
    lists = pa.ListViewArray.from_arrays(
        pa.array(starts, pa.int32()), pa.array(sizes, pa.int32()), pa.array(np.zeros(count, "i1"))
    )
    return request_bytes(pa.record_batch({"seen": lists}))


def test_bytes_that_stand_for_much_memory_are_refused(server, asked):
    nulls = pa.record_batch(dict.fromkeys(asked.column_names, of_nulls(2**31 - 1)))
    offsets = pa.array([0, 2**31 - 1], pa.int32())
    listed = pa.ListArray.from_arrays(offsets, of_nulls(2**31 - 1))
    folded = pa.RunEndEncodedArray.from_arrays(pa.array([400], pa.int32()), pa.array([7]))
    zipped = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(zipped, asked.schema, options=options) as writer:
        writer.write(asked)
    with grpc.insecure_channel(server.address) as channel:
        for data, says in (
            (request_bytes(nulls), "has 2147483647 rows and at most 500"),
            (request_bytes(pa.record_batch({"item": listed})), "has a null inside the list"),
            (request_bytes(pa.record_batch({"item": folded})), "has type run_end_encoded"),
            (zipped.getvalue().to_pybytes(), "is compressed"),
            # a million columns could have the bytes of one, and a copy each
            (sharing(["age", "price"]), "buffers of the request share bytes"),
            (sharing(["other", "another"]), "buffers of the request share bytes"),
            (in_batches(["seen", "seen"], 2), "column 'seen' occurs 2 times"),
            (in_batches(["seen"], 257), "has 257 record batches and at most 256"),
            (with_delta(), "adds to a dictionary"),
            # a list of each row, all of which are one
            (viewed([0] * 400, [40_000] * 400, 40_000), "lists of column 'seen' of the request s"),
            (viewed([4, 0, 2], [2, 3, 2], 8), "lists of column 'seen' of the request share values"),
            (b"", "is empty"),
        ):
            told = ask_bytes(channel, data)
            assert told.startswith("INVALID_ARGUMENT: ") and says in told
        assert ask_bytes(channel, request_bytes(asked)) == "OK"
        lists = asked["seen"].combine_chunks()
        views = pa.ListViewArray.from_arrays(
            lists.offsets[:-1], lists.value_lengths(), lists.values
        ).take(pa.array(np.arange(len(asked))[::-1]))
        one = asked.take(pa.array(np.arange(len(asked))[::-1]))
        one = one.set_column(one.schema.get_field_index("seen"), "seen", views)
        assert ask_bytes(channel, request_bytes(one)) == "OK"


def test_health_checks_do_not_wait_while_a_request_is_read(server, client, asked, monkeypatch):
    reads, goes_on = answering.asked, threading.Event()
    entered: list[bytes] = []

    def slow(*given):
        entered.append(given[-1])
        assert goes_on.wait(100)
        return reads(*given)

    monkeypatch.setattr(answering, "asked", slow)
    with ThreadPoolExecutor(1) as pool:
        try:
            ask = pool.submit(server.http, "/predict", {"columns": asked.to_pydict()})
            wait_for(lambda: entered)
            for path in ("/health", "/ready", "/metrics"):
                assert server.http(path)[0] == 200
            assert not ask.done()
        finally:
            goes_on.set()
        assert ask.result()[0] == 200


def test_what_waits_to_be_read_has_a_bound(predictor, monkeypatch):
    goes_on, body = threading.Event(), b" " * 10_000
    monkeypatch.setattr(answering, "asked", lambda *_: goes_on.wait(100))

    async def main() -> None:
        settings = ServerSettings(max_bytes=1024)
        one = answering.Answering(predictor, settings, Metrics("7-ab"), lambda: None)
        first = asyncio.create_task(one._read("application/json", body))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="10000 bytes wait to be read, and 16384 may"):
            await one._read("application/json", body)
        goes_on.set()
        assert await first
        assert await one._read("application/json", body)
        one.close()

    asyncio.run(main())


def test_a_loop_without_file_descriptors_says_it_in_a_line(server, capfd):
    said = {"message": "socket.accept() out of system resource", "exception": OSError(24, "full")}
    for _ in range(200):
        server.loop.call_soon_threadsafe(server.loop.call_exception_handler, said)
    assert server.http("/health")[0] == 200
    assert capfd.readouterr().err == "socket.accept() out of system resource: [Errno 24] full\n"


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_replica_outlives_any_bytes(server, client, predictor, asked, count):
    """Each answer has a status that says whose fault it is, and none is a defect of the server."""
    rng = random.Random(count)
    whole = streams(asked)
    seen = set()
    with grpc.insecure_channel(server.address) as channel:
        for _ in range(count):
            seen.add(ask_bytes(channel, mutated(rng.choice(whole), rng)).split(":")[0])
    assert seen <= {"OK", "INVALID_ARGUMENT"} and "INVALID_ARGUMENT" in seen
    np.testing.assert_allclose(client.predict(asked), predictor.predict(asked), **CLOSE)


def test_requests_that_wait_are_scored_together_and_apart_in_their_errors(server, predictor, asked):
    parts = [asked[at : at + 2] for at in range(0, 20, 2)]
    wanted = [predictor.predict(part).numpy() for part in parts]
    broken = _with(parts[4], "price", 1, HeldPredictor.BREAKS_AT)
    far = _with(parts[5], "item", 1, 99)
    narrow = _put(parts[6], "item", pa.array(parts[6]["item"].to_pylist(), pa.int16()))
    given = [*parts[:4], broken, far, narrow, *parts[7:]]
    before = server.numbers()
    with server.client() as client, ThreadPoolExecutor(len(given) + 1) as pool:
        with predictor.held():
            first = pool.submit(client.predict, asked)
            wait_for(lambda: server.replica.answering.queue._rows == 20)
            time.sleep(0.05)
            asks = [pool.submit(client.predict, part) for part in given]
            wait_for(lambda: server.replica.answering.queue._rows == 40)
        np.testing.assert_allclose(first.result(), predictor.predict(asked), **CLOSE)
        for number, (ask, scores) in enumerate(zip(asks, wanted, strict=True)):
            if number == 4:
                with pytest.raises(ServingError, match="failed with RuntimeError; its log has"):
                    ask.result()
            elif number == 5:
                with pytest.raises(InputError, match="holds id 99 in row 1 of the request"):
                    ask.result()
            else:
                np.testing.assert_allclose(ask.result(), scores, **CLOSE)
    change = {name: value - before[name] for name, value in server.numbers().items()}
    assert change['rayrec_serve_requests_total{outcome="ok",protocol="grpc"}'] == 9
    assert change['rayrec_serve_requests_total{outcome="input",protocol="grpc"}'] == 1
    assert change['rayrec_serve_requests_total{outcome="defect",protocol="grpc"}'] == 1
    assert change["rayrec_serve_batch_rows_sum"] == 20 + 16
    assert change['rayrec_serve_latency_seconds_count{protocol="grpc"}'] == 9


def test_the_metrics_of_the_page_are_there(server):
    names = {name.split("{")[0] for name in server.numbers()}
    assert {
        "rayrec_serve_requests_total",
        "rayrec_serve_latency_seconds_bucket",
        "rayrec_serve_batch_requests_bucket",
        "rayrec_serve_batch_rows_bucket",
        "rayrec_serve_unknown_ids_total",
        "rayrec_serve_queue_rows",
        "rayrec_serve_replicas",
        "rayrec_serve_starts_total",
    } <= names


def wait_for(holds) -> None:
    end = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.seeds(range(5))
def test_what_is_scored_together_has_the_scores_of_each_alone(server, predictor, seed):
    """Requests of random sizes and column types, from several threads at once."""
    rng = random.Random(seed)

    def one(number: int) -> tuple[pa.Table, np.ndarray]:
        table = rows(rng.choice([0, 1, 1, 2, 7]), 100 * seed + number).drop_columns(["click"])
        if rng.random() < 0.3:
            table = _put(table, "item", pa.array(table["item"].to_pylist(), pa.int32()))
        if rng.random() < 0.3:
            table = _put(table, "words", pa.nulls(len(table)))
        if rng.random() < 0.3:
            table = table.select(rng.sample(table.column_names, table.num_columns))
        return table, predictor.predict(table).numpy()

    given = [one(number) for number in range(40)]
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        for (_, wanted), scores in zip(
            given, pool.map(client.predict, [table for table, _ in given]), strict=True
        ):
            np.testing.assert_allclose(scores, wanted, **CLOSE)


def test_users_that_wait_together_have_the_scores_of_each_alone(server, predictor, asked):
    users = [asked[at : at + 1].select(["age", "seen"]) for at in range(3)]
    candidates = asked.drop_columns(["age", "seen"])
    wanted = [predictor.predict_candidates(user, candidates).numpy() for user in users]
    assert not np.allclose(wanted[0], wanted[1], **CLOSE)
    queue = server.replica.answering.queue
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        with predictor.held():
            first = pool.submit(client.predict, asked[:1])
            wait_for(lambda: queue._rows == 1)
            asks = [pool.submit(client.predict_candidates, user, candidates) for user in users]
            wait_for(lambda: queue._rows == 1 + 3 * len(candidates))
        first.result()
        for ask, scores in zip(asks, wanted, strict=True):
            np.testing.assert_allclose(ask.result(), scores, **CLOSE)


def test_a_full_queue_says_so_and_recovers(server, predictor, asked):
    with server.client() as client, ThreadPoolExecutor(30) as pool:
        with predictor.held():
            # one is being scored, and 400 rows may wait or be scored
            asks = [pool.submit(client.predict, asked) for _ in range(20)]
            wait_for(lambda: server.replica.answering.queue._rows == 400)
            with pytest.raises(OverloadedError, match=r"400 rows of .* wait already, and 400"):
                client.predict(asked[:1])
            status, said, headers = server.http("/predict", {"columns": asked[:1].to_pydict()})
            assert (status, said["error"]) == (503, "OverloadedError")
            assert headers["retry-after"] == "1"
            assert server.numbers()["rayrec_serve_queue_rows"] == 400
            for name in ("health", "ready"):
                assert server.http(f"/{name}")[0] == 200
        wanted = predictor.predict(asked)
        for ask in asks:
            np.testing.assert_allclose(ask.result(), wanted, **CLOSE)
        np.testing.assert_allclose(client.predict(asked), wanted, **CLOSE)
    assert server.numbers()["rayrec_serve_queue_rows"] == 0


def test_a_request_whose_time_has_passed_is_not_scored(server, predictor, asked):
    before = server.numbers()
    with server.client() as client, predictor.held(), ThreadPoolExecutor(1) as pool:
        pool.submit(client.predict, asked[:1])
        wait_for(lambda: server.replica.answering.queue._rows == 1)
        time.sleep(0.05)
        with pytest.raises(DeadlineError):
            client.predict(asked, timeout_s=0.05)
        status, said, _ = server.http("/predict", {"columns": asked.to_pydict(), "timeout_ms": 50})
        assert (status, said["error"]) == (504, "DeadlineError")
        assert said["message"] == "the request had 50 ms, which have passed."
        predictor.gate.set()
    wait_for(lambda: server.replica.answering.queue._rows == 0)
    after = server.numbers()
    assert after["rayrec_serve_batch_rows_sum"] - before["rayrec_serve_batch_rows_sum"] == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_request_that_nobody_waits_for_makes_room_for_others(predictor, asked, is_late):
    """While nothing is scored, its caller goes or its time passes; the queue was full of it."""

    async def main() -> None:
        settings = ServerSettings(queue_rows=20)
        one = answering.Answering(predictor, settings, Metrics("7-ab"), lambda: None)

        def ask(rows: pa.Table, timeout_s: float = 200.0) -> asyncio.Task[Answer]:
            return asyncio.create_task(one.score(ARROW_TYPE, request_bytes(rows), timeout_s))

        try:
            with predictor.held():
                asks = [ask(asked[:1])]
                while not one.queue._rows or one.queue._jobs:
                    await asyncio.sleep(0.001)
                gone = ask(asked[:19], 0.05 if is_late else 200.0)
                await asyncio.sleep(0)
                with pytest.raises(OverloadedError, match="20 rows of"):
                    await ask(asked[:1])
                if not is_late:
                    gone.cancel()
                with pytest.raises(DeadlineError if is_late else asyncio.CancelledError):
                    await gone
                await asyncio.sleep(0)
                asks.append(ask(asked[1:20]))
                await asyncio.sleep(0)
                assert one.queue._rows == 20
            scores = [(await ask).scores for ask in asks]
            np.testing.assert_allclose(np.concatenate(scores), predictor.predict(asked), **CLOSE)
            await one.queue.drain()
        finally:
            one.close()

    asyncio.run(main())


def test_a_request_by_http_whose_client_is_gone_is_not_scored(server, predictor, asked):
    queue, before = server.replica.answering.queue, server.numbers()
    body = json.dumps({"columns": asked.to_pydict()})
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with server.client() as client, ThreadPoolExecutor(1) as pool, predictor.held():
        pool.submit(client.predict, asked[:1])
        wait_for(lambda: queue._rows == 1 and not queue._jobs)
        with socket.create_connection(("127.0.0.1", server.replica.settings.http_port)) as link:
            link.sendall(f"POST /predict HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            wait_for(lambda: queue._rows == 21)
        wait_for(lambda: queue._rows == 1)
    after = server.numbers()
    name = 'rayrec_serve_requests_total{outcome="cancelled",protocol="http"}'
    assert after[name] - before[name] == 1


def test_the_time_of_reading_is_a_part_of_the_callers(predictor, asked, monkeypatch):
    """The clock says that the whole time went by in the reading; nothing is scored meanwhile."""
    clock = iter((5.0, 1005.0))
    monkeypatch.setattr(answering, "perf_counter", clock.__next__)

    async def main() -> None:
        one = answering.Answering(predictor, ServerSettings(), Metrics("7-ab"), lambda: None)
        try:
            with (
                predictor.held(),
                pytest.raises(DeadlineError, match="had 1000000 ms, which have passed"),
            ):
                await one.score(ARROW_TYPE, request_bytes(asked), 1000.0)
        finally:
            one.close()

    asyncio.run(main())
    assert not list(clock)


def test_a_replica_that_ends_answers_what_it_has(predictor, asked):
    with running(predictor) as server, server.client() as client, ThreadPoolExecutor(9) as pool:
        wanted = predictor.predict(asked)
        with predictor.held():
            asks = [pool.submit(client.predict, asked) for _ in range(4)]
            asks += [
                pool.submit(server.http, "/predict", {"columns": asked.to_pydict()})
                for _ in range(4)
            ]
            wait_for(lambda: server.replica.answering.queue._rows == 160)
            ended = server.stop()
            wait_for(lambda: not server.replica.health.is_ready)
            with pytest.raises((UnavailableError, DeadlineError)):
                client.predict(asked, timeout_s=0.5)
            assert not ended.done()
        for number, ask in enumerate(asks):
            got = ask.result() if number < 4 else ask.result()[1]["scores"]
            np.testing.assert_allclose(got, wanted, **CLOSE)
        ended.result(100)
        assert server.replica.code == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("hangs", [True, False])
def test_a_replica_that_cannot_score_any_more_answers_what_it_has_and_ends(
    predictor, asked, monkeypatch, hangs
):
    """Its thread is in a call that does not return, or was ended by one."""
    monkeypatch.setattr(scoring_queue, "_HANGS_S", 1.0 if hangs else 1000.0)
    monkeypatch.setattr(scoring_queue, "_TURN_S", 0.05)
    ended = threading.Event()

    def score(request):
        ended.wait(100)
        raise SystemExit

    with running(predictor, max_batch_rows=1, drain_s=300) as server, ThreadPoolExecutor(9) as pool:
        queue = server.replica.answering.queue
        monkeypatch.setattr(predictor, "score_and_weights", score)
        with server.client() as client:
            asks = [pool.submit(client.ask, asked) for _ in range(4)]
            wait_for(lambda: queue._rows == 80)
            if not hangs:
                ended.set()
            errors = [type(ask.exception(100)) for ask in asks]
        assert sorted(errors, key=str) == [ServingError, *[UnavailableError] * 3]
        assert server.replica.code == 1 and server.replica.ended.is_set()
        server.stop().result(100)
        ended.set()


def test_nobody_at_the_address_is_said(asked):
    with Client("127.0.0.1:1", timeout_s=2) as client, pytest.raises(UnavailableError) as caught:
        client.predict(asked)
    assert str(caught.value).startswith("127.0.0.1:1: unavailable: ")


def test_an_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == "aiohttp" else name)
    with pytest.raises(ConfigError, match=r"needs aiohttp. .*pip install 'rayrec\[serve\]'"):
        settings.check_installed()
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"needs the package grpcio.*'rayrec\[serve\]'"):
        Client()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"port": 70000}, "port=70000"),
        ({"port": 80, "http_port": 80}, "port=80 is both that of gRPC and of HTTP"),
        ({"replicas": 0}, "replicas=0"),
        ({"queue_rows": 0}, "queue_rows=0"),
        ({"max_bytes": 10}, "max_bytes=10"),
        ({"drain_s": 0}, "drain_s=0"),
        ({"host": " "}, "host=' '"),
    ],
)
def test_settings_are_checked(given, says):
    with pytest.raises(ConfigError, match=says):
        ServerSettings(**given)
