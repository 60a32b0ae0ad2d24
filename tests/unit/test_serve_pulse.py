"""The parent of replicas tells one that hangs from one that has no core."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import pytest

from rayrec.serve import Predictor
from rayrec.serve.server import leading, pulse, supervisor
from rayrec.serve.server.leading import Following, Lead
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.pulse import Pulses, core_wait_s
from rayrec.serve.server.replica import Replica
from rayrec.serve.server.settings import ServerSettings
from tests.unit.published_worlds import published_world
from tests.unit.served_processes import wait_for

FORK = multiprocessing.get_context("fork")


@contextmanager
def forked(target, *given) -> Iterator[BaseProcess]:
    process = FORK.Process(target=target, args=given)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def beats(pulses: Pulses) -> None:
    asyncio.run(pulses.beat(0))


def test_a_process_that_is_stopped_is_silent_until_it_goes_on(monkeypatch):
    monkeypatch.setattr(pulse, "TURN_S", 0.02)
    pulses = Pulses(1)
    pulses.begin(0)
    with forked(beats, pulses) as process:
        pids = {0: process.pid}
        wait_for(lambda: pulses._steps[0] > 3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)  # a step that was on its way
        pulses.look(pids)
        silent = [pulses.look(pids)[0] for _ in range(25) if not time.sleep(0.02)]
        assert silent == sorted(silent) and silent[-1] > 0.25
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: pulses.look(pids)[0] == 0)


def spin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def test_a_process_that_waits_for_a_core_is_not_silent(monkeypatch):
    """Three that want one core all the time: each waits for most of the time, as on a busy host."""
    core = min(os.sched_getaffinity(0))
    with forked(spin, core) as one, forked(spin, core), forked(spin, core):
        if not os.path.exists(f"/proc/{one.pid}/task/{one.pid}/schedstat"):
            pytest.skip("the kernel does not count how long threads wait for a core")
        wait_for(lambda: core_wait_s(one.pid) > 0.2)
    pulses = Pulses(1)
    # it waits for a core as long as somebody looks, and takes no step
    waited = iter(range(1, 1000))
    monkeypatch.setattr(pulse, "core_wait_s", lambda pid: float(next(waited)))
    for _ in range(30):
        time.sleep(0.005)
        assert pulses.look({0: 1}) == {0: 0.0}


def test_time_in_which_nobody_looked_is_nobodys_silence(monkeypatch):
    monkeypatch.setattr(pulse, "TURN_S", 0.01)
    pulses = Pulses(1)
    time.sleep(0.2)
    # of a process that is not there, which waits for no core
    assert 0 < pulses.look({0: 2**22 + 1})[0] <= 0.02
    assert pulses.due_s() <= 0.01
    pulses.begin(0)
    pulses._steps[0] += 1
    assert pulses.look({0: 2**22 + 1}) == {0: 0.0}


def test_a_parent_rests_while_its_replicas_change_over(tmp_path):
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    lead = Lead(Predictor.follow(world.folder), 1e-6)
    ours, theirs = multiprocessing.Pipe()
    world.train(random.Random(0))
    world.publish()
    assert lead.timeout() == 0.0
    lead.turn({0: ours})
    assert theirs.recv().version.step == world.step
    assert lead.timeout() > 10.0
    lead.heard(0)
    assert lead.timeout() == 0.0


def test_a_replica_that_hangs_at_a_version_is_killed_by_its_parent(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(leading, "_LATE_S", 0.01)
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    parent = supervisor.Supervisor(Predictor.follow(world.folder), ServerSettings(poll_s=1e-6))
    (slot,), lead, gate, killed = parent._slots, parent._lead, threading.Event(), []
    slot.process, (slot.said, theirs) = (
        SimpleNamespace(kill=lambda: killed.append(0)),
        multiprocessing.Pipe(),
    )
    monkeypatch.setattr(lead.predictor, "wait_unread", lambda copy: gate.wait(200))
    world.train(random.Random(0))
    world.publish()
    lead.turn({0: slot.said})

    async def replica() -> None:
        Following(lead, theirs, Metrics(None))
        while not slot.said.poll():
            await asyncio.sleep(0.001)
        assert lead.timeout() == math.inf
        parent._hear(slot, "a chain")
        assert killed == [0] and lead.timeout() == 0.0
        gate.set()

    asyncio.run(replica())
    assert capfd.readouterr().err == "replica 0 does not change over; it is killed\n"
    assert killed == [0] and slot.said is None


def test_a_replica_that_is_killed_is_not_waited_for_however_slowly_it_dies(
    tmp_path, monkeypatch, capfd
):
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    parent = supervisor.Supervisor(Predictor.follow(world.folder), ServerSettings(poll_s=1e-6))
    (slot,), lead, killed = parent._slots, parent._lead, []
    slot.process = SimpleNamespace(pid=7, kill=lambda: killed.append(0))
    (slot.said, _), slot.is_ready = multiprocessing.Pipe(), True
    world.train(random.Random(0))
    world.publish()
    lead.turn({0: slot.said})
    assert lead.timeout() == math.inf
    monkeypatch.setattr(parent._pulses, "look", lambda pids: dict.fromkeys(pids, 25.0))
    for _ in range(3):
        parent._end_what_hangs()
        assert killed == [0] and lead.timeout() == 0.0
    assert capfd.readouterr().err == "replica 0 hangs: silent for 25 s; it is killed\n"


def test_a_replica_that_ends_changes_over_with_the_others(tmp_path, monkeypatch):
    """It may have requests to answer for long after it was told to end."""
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    lead, (ours, theirs) = Lead(Predictor.follow(world.folder), 1e-6), multiprocessing.Pipe()
    settings = ServerSettings(port=0, http_port=0, lame_duck_s=0, drain_s=200)
    world.train(random.Random(0))
    world.publish()

    async def replica() -> None:
        one = Replica(lead.predictor, settings, lead, theirs)
        await one.start()
        drains, answered = asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            drains.set()
            await answered.wait()

        monkeypatch.setattr(one.answering.queue, "drain", drain)
        ending = asyncio.create_task(one.stop())
        try:
            await asyncio.wait_for(drains.wait(), 100)
            lead.turn({0: ours})
            assert await asyncio.to_thread(ours.poll, 20)
            assert ours.recv_bytes() == leading.CHANGED and not ending.done()
        finally:
            answered.set()
            await ending

    asyncio.run(replica())


def test_why_a_replica_cannot_change_over_is_told(tmp_path, monkeypatch):
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    lead, (ours, theirs) = Lead(Predictor.follow(world.folder), 1e-6), multiprocessing.Pipe()
    world.train(random.Random(0))
    world.publish()
    lead.turn({0: ours})
    told: list[BaseException] = []

    def take(version: object) -> None:
        raise MemoryError("no room for the dense part")

    monkeypatch.setattr(lead.predictor, "take", take)

    async def replica() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        following = Following(lead, theirs, Metrics(None))
        while not told:
            await asyncio.sleep(0.001)
        assert following.told

    asyncio.run(asyncio.wait_for(replica(), 200))
    assert isinstance(told[0], MemoryError)
    # long before it would be late
    assert ours.poll(0) and ours.recv_bytes() == leading.LATE


def test_a_replica_that_cannot_read_what_it_is_told_is_not_waited_for(tmp_path):
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    lead, (ours, theirs) = Lead(Predictor.follow(world.folder), 1e-6), multiprocessing.Pipe()
    told: list[BaseException] = []

    async def replica() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        Following(lead, theirs, Metrics(None))
        ours.send_bytes(b"no message")
        assert await asyncio.to_thread(ours.poll, 20) and ours.recv_bytes() == leading.LATE
        ours.close()  # it does not listen any more, so it hears of no end either
        await asyncio.sleep(0.05)

    asyncio.run(replica())
    assert [type(error) for error in told] == [pickle.UnpicklingError]


def test_a_version_reaches_the_replicas_without_a_disk(tmp_path, monkeypatch):
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    predictor = Predictor.follow(world.folder)
    world.train(random.Random(0))
    world.publish()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    lead = Lead(predictor, 1e-6)
    ours, theirs = multiprocessing.Pipe()
    lead.turn({0: ours})
    told = theirs.recv().version
    assert told.step == world.step and not told.dense
    assert lead.dense_of(told) == predictor.follower.version
