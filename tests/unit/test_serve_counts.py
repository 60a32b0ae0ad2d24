"""A body that does not come is counted, too; what ends is started again, later each time."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
from aiohttp import web
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from rayrec.serve.server import supervisor
from rayrec.serve.server.forked import run_forked
from rayrec.serve.server.http_service import HttpService
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.process_slot import wait_before
from rayrec.serve.server.settings import METRICS_FOLDER, ServerSettings

TOO_LARGE = web.HTTPRequestEntityTooLarge(max_size=10, actual_size=11)


class Unread:
    """A request whose body cannot be read."""

    content_type = "application/json"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def read(self) -> bytes:
        raise self._error


@pytest.mark.parametrize(
    ("error", "outcome", "raised"),
    [
        (TOO_LARGE, "input", web.HTTPRequestEntityTooLarge),
        (ConnectionResetError("gone"), "cancelled", web.HTTPBadRequest),
        (web.RequestPayloadError("short"), "cancelled", web.HTTPBadRequest),
        (asyncio.CancelledError(), "cancelled", asyncio.CancelledError),
        (RuntimeError("a defect" * 10_000), "defect", None),
    ],
)
def test_a_body_that_does_not_come_is_counted_once(error, outcome, raised, capfd):
    counted = []
    metrics = SimpleNamespace(answered=lambda *given: counted.append(given))
    service = HttpService(SimpleNamespace(metrics=metrics), None, ServerSettings())
    asked = service._predict(Unread(error))
    if raised is not None:
        with pytest.raises(raised):
            asyncio.run(asked)
    else:
        answer = asyncio.run(asked)
        said = json.loads(answer.text)
        assert (answer.status, said["error"]) == (500, "ServingError")
        assert "failed with RuntimeError; its log has" in said["message"]
        said = capfd.readouterr().err
        assert "RuntimeError: a defect" in said and "a defect\n" in said and len(said) < 20_000
    assert counted == [("http", outcome, 0.0)]


def test_numbers_are_read_while_a_replica_has_an_empty_file(tmp_path, monkeypatch):
    monkeypatch.setenv(METRICS_FOLDER, str(tmp_path))
    metrics = Metrics("7-ab")
    started = MmapedDict(str(tmp_path / "counter_1.db"))
    key = mmap_key("starts", "starts_total", (), (), "replicas that were started")
    started.write_value(key, 2.0, 0.0)
    started.close()
    (tmp_path / "counter_2.db").touch()
    (tmp_path / "gauge_livesum_3.db").symlink_to(tmp_path / "gone")  # listed, and deleted then
    assert b"\nstarts_total 2.0\n" in metrics.text()


def test_waits_double_up_to_ten_seconds():
    waits = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert [wait_before(failed) for failed in range(1, 10)] == pytest.approx(waits)
    assert wait_before(10**9) == 10.0


def test_a_replica_that_lived_long_is_started_again_without_a_longer_wait(monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "forget_numbers", lambda pid: None)
    parent = supervisor.Supervisor(None, ServerSettings(replicas=1))
    (slot,) = parent._slots
    for is_sound in (False, False, False, True, False):
        slot.process = SimpleNamespace(pid=7, exitcode=1, join=lambda: None)
        # whatever the clock says
        slot.is_ready, slot.started = True, float("-inf" if is_sound else "inf")
        parent._bury(slot)
    told = [line.rsplit(" in ", 1)[1] for line in capfd.readouterr().err.splitlines()]
    assert told == ["0.1 s", "0.2 s", "0.4 s", "0.1 s", "0.2 s"]


def test_a_replica_to_which_the_system_refuses_a_file_says_it_in_a_line(monkeypatch, capfd):
    def run_replica(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("rayrec.serve.server.replica.run_replica", run_replica)
    given = SimpleNamespace(collections={}), None, 3, None, None, None, os.getpid()
    process = multiprocessing.get_context("fork").Process(target=run_forked, args=given)
    process.start()
    process.join(100)
    assert process.exitcode == 1
    # where a test before used gRPC, it may say that it does nothing about the fork
    lines = [one for one in capfd.readouterr().err.splitlines() if "fork_posix.cc" not in one]
    assert lines == ["replica 3: [Errno 24] Too many open files"]


def test_a_signal_reaches_the_replicas_at_once_and_once():
    parent, told = supervisor.Supervisor(None, ServerSettings(replicas=2)), []
    first, second = parent._slots
    first.process = SimpleNamespace(
        pid=7, exitcode=0, terminate=lambda: told.append(7), join=lambda seconds: None
    )
    second.process = SimpleNamespace(pid=None)  # about to be forked
    for number in (signal.SIGTERM, signal.SIGINT):
        # in the middle of whatever the parent does, such as reading a base
        parent._on_signal(number, None)
        assert told == [7]
    second.process = None
    parent._drain()
    assert told == [7]
