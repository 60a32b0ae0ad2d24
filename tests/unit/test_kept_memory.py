"""Memory that outlives its process: who maps it next finds what the killed one wrote."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from pathlib import Path

import pytest

from rayrec.comm import memory_keeper
from rayrec.comm.kept_memory import KeptMemory, end_keeper, end_keepers
from rayrec.errors import CommError, ConfigError


def write_and_die(name: str) -> None:
    piece = KeptMemory(name, 3).take("a/b", 5_000_000)
    piece[:] = 7
    os.kill(os.getpid(), signal.SIGKILL)


def keepers(name: str) -> list[int]:
    """Processes of keepers by their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"rayrec-{name}".encode() in words:
            found.append(int(path.parent.name))
    return found


def wait_until(true, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_a_killed_process_wrote_is_found_by_the_next() -> None:
    name = uuid.uuid4().hex
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(name,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    memory = KeptMemory(name, 3)
    try:
        assert len(keepers(name)) == 1
        piece = memory.take("a/b", 5_000_000)
        assert bool((piece == 7).all())
        assert not memory.take("a/b", 6_000_000).any(), "another size is another piece"
        assert not KeptMemory(name, 4).take("a/b", 5_000_000).any(), "another rank's"
        file = memory.file("c", 4096)
        os.pwrite(file, b"x", 9)
        os.close(file)
        assert int(memory.take("c", 4096)[9]) == ord("x")
        memory.clear()
        assert not memory.take("c", 4096).any()
        assert bool((piece == 7).all()), "what is mapped stays"
    finally:
        end_keepers()
    wait_until(lambda: not keepers(name))


def test_a_run_of_another_name_ends_the_keeper_of_the_one_before() -> None:
    first, second = uuid.uuid4().hex, uuid.uuid4().hex
    KeptMemory(first, 0)
    KeptMemory(second, 0)
    wait_until(lambda: not keepers(first))
    assert len(keepers(second)) == 1
    end_keeper(second)
    wait_until(lambda: not keepers(second))
    end_keepers()


def test_a_keeper_that_is_gone_is_an_error_that_says_what_to_do() -> None:
    name = uuid.uuid4().hex
    memory = KeptMemory(name, 0)
    os.kill(keepers(name)[0], signal.SIGKILL)
    wait_until(lambda: not keepers(name))
    with pytest.raises(CommError, match=r"keeps the memory of this host failed .* leave out"):
        memory.take("a", 64)
    # the next life of the run starts another, which has nothing
    assert not KeptMemory(name, 0).take("a", 64).any()
    end_keepers()


def leave(name: str) -> None:
    KeptMemory(name, 0)


@pytest.mark.slow
def test_a_keeper_ends_with_the_processes_that_started_it() -> None:
    """The parent of the rank, as a raylet is, and the rank are gone."""
    name = uuid.uuid4().hex

    # a process between, which is the parent of the one that connects
    between = multiprocessing.get_context("spawn").Process(target=leave_by_a_child, args=(name,))
    between.start()
    between.join()
    wait_until(lambda: not keepers(name), memory_keeper.ORPHANED_S + 15)


def leave_by_a_child(name: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=leave, args=(name,))
    child.start()
    child.join()


def test_a_machine_that_cannot_keep_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrec.comm.kept_memory.unsupported", lambda: "needs Linux")
    with pytest.raises(ConfigError, match=r"sync_every_n_steps=...\) needs Linux; leave it out"):
        KeptMemory("x", 0)
