"""What a test session leaves on the machine: processes that it started, near or far, and shared
memory that nobody holds.

Every process started after `mark_session` has the mark in the environment it was born with, also
when its parent is gone; nothing else of the machine is looked at. Shared memory has no such mark,
so a new name in /dev/shm counts when it is of this user and no process has it open or mapped. Linux
only: elsewhere both lists are empty.

As a plugin of pytest this looks once, when the session and all its worker processes (pytest-xdist)
have ended. Only the process that the user started looks: its workers inherit its mark, so that none
of them can mistake what another still needs for something left.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

VARIABLE = "RAYREC_TEST_SESSION"
SHM = Path("/dev/shm")


def mark_session() -> str:
    """Mark every process that will be started from here on; returns the mark."""
    os.environ[VARIABLE] = uuid.uuid4().hex
    return os.environ[VARIABLE]


def processes_of(mark: str) -> dict[int, str]:
    """Process id -> command line of those with the mark, but for Python's own helpers of this
    process, which end with it.
    """
    helpers = {
        os.getpid(),
        resource_tracker._resource_tracker._pid,
        forkserver._forkserver._forkserver_pid,
    }  # type: ignore[attr-defined]
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            born_with, command = (
                (entry / "environ").read_bytes(),
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
            )
        except OSError:  # gone, or of another user
            continue
        if f"{VARIABLE}={mark}".encode() in born_with and int(entry.name) not in helpers:
            found[int(entry.name)] = command[:200]
    return found


def processes_with(mark: str) -> list[int]:
    """Process ids whose environment has `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm that belong to this user."""
    names = set()
    for path in SHM.glob("*"):
        try:
            if path.stat().st_uid == os.getuid():
                names.add(path.name)
        except OSError:
            continue
    return names


def unheld(names: set[str]) -> set[str]:
    """Those names that no process has open or mapped."""
    held = {
        Path(line.removesuffix(" (deleted)")).name
        for line in _open_paths()
        if line.startswith(f"{SHM}/")
    }
    return names - held


def left_behind(mark: str, shared_before: set[str], timeout_s: float = 20.0) -> list[str]:
    """What is still there after at most `timeout_s`, one line each; processes may take a moment to
    end.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        lines = [f"process {pid}: {command}" for pid, command in processes_of(mark).items()]
        lines += [
            f"shared memory {SHM / name}"
            for name in sorted(unheld(shared_memory() - shared_before))
        ]
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.2)


class NothingLeft:
    """Fails the session when something of it is left."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.before, self.mark = timeout_s, shared_memory(), mark_session()
        self.left: list[str] = []

    @pytest.hookimpl(trylast=True)  # after fixtures of the session and workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.left = left_behind(self.mark, self.before, self.timeout_s)
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.section("left behind by this session", red=True)
            for line in self.left:
                terminalreporter.line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "seconds that processes of a session may take to end after it"
    parser.getgroup("leftovers").addoption("--ending", type=float, default=20.0, help=help)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # which worker processes have
        config.pluginmanager.register(NothingLeft(config.getoption("ending")), "nothing-left")


def _open_paths() -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            for line in (entry / "maps").read_text().splitlines():
                yield line.split(maxsplit=5)[-1]
            for link in (entry / "fd").iterdir():
                yield os.readlink(link)
        except OSError:
            continue
