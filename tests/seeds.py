"""Which random worlds a run draws: a fixed part, all that are fixed, one again, or new ones.

A test says `@pytest.mark.seeds(range(200))` and takes `seed`. A run gives it

    (nothing)                     the first tenth of these seeds, at most twelve
    --seeds all                   all of them
    --seeds 1234567               this one, whatever the test names
    --worlds TEXT --seconds 480   new seeds that follow from TEXT, until the time is over

New seeds lie outside of all that tests name, and all tests get the same ones, seed by seed, so that
every test gets its turn. A test must therefore hold for any seed. When a world fails, the output
ends with the command that repeats it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence

import pytest

FRACTION, MOST = 10, 12
FIRST_NEW, LAST_NEW = 1_000_000, 1_000_000_000
ROUND_S = 8  # less than a core needs for one seed of all tests
SEED_IN_ID = re.compile(r"\[(?:.*-)?seed(\d+)(?:-.*)?\]$")


def fixed_part(seeds: Sequence[int]) -> Sequence[int]:
    """The first tenth of the seeds, rounded up, and at most twelve.

    They are neighbours, since many tests choose variants by the remainder of a seed.
    """
    return seeds[: min(MOST, math.ceil(len(seeds) / FRACTION))]


def new_seeds(text: str, count: int) -> range:
    """Seeds that follow from a text."""
    digest = hashlib.sha256(text.encode()).digest()
    start = FIRST_NEW + int.from_bytes(digest[:8], "big") % (LAST_NEW - FIRST_NEW)
    return range(start, start + count)


def chosen(seeds: Sequence[int], config: pytest.Config) -> Sequence[int]:
    """The seeds that this run gives to a test that names `seeds`."""
    if text := config.getoption("worlds"):
        workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
        return new_seeds(text, 1 + math.ceil(config.getoption("seconds") * workers / ROUND_S))
    which = config.getoption("seeds")
    if which == "all":
        return seeds
    return [int(which)] if which.isdecimal() else fixed_part(seeds)


def repeat_command(nodeid: str) -> str | None:
    """The command that runs one world again, or None when the test has no seed."""
    if nodeid.rfind("@") > nodeid.rfind("]"):
        nodeid = nodeid.rsplit("@", 1)[0]  # a group's name, which pytest-xdist appends
    found = SEED_IN_ID.search(nodeid)
    if found is None:
        return None
    inside = os.path.relpath(sys.executable)
    python = sys.executable if inside.startswith("..") else inside
    return f"{python} -m pytest {shlex.quote(nodeid)} --seeds {found[1]}"


def _which_seeds(text: str) -> str:
    if text not in ("tenth", "all") and not text.isdecimal():
        raise pytest.UsageError(f"--seeds {text} is none of tenth, all and a number")
    return text


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random worlds")
    seeds = "seeds of random worlds: tenth (of those that a test names; the default), all, a number"
    group.addoption("--seeds", type=_which_seeds, default="tenth", help=seeds)
    group.addoption("--worlds", metavar="TEXT", help="random worlds alone, of new seeds from TEXT")
    group.addoption("--seconds", type=float, default=60.0, help="how long --worlds goes on")


def pytest_configure(config: pytest.Config) -> None:
    if text := config.getoption("worlds"):
        plugin = NewWorlds(text, config.getoption("seconds"))
        config.pluginmanager.register(plugin, "new-worlds")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test its seeds."""
    mark = metafunc.definition.get_closest_marker("seeds")
    if mark is not None:
        seeds = chosen(mark.args[0], metafunc.config)
        metafunc.parametrize("seed", seeds, ids=[f"seed{seed}" for seed in seeds])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to repeat the worlds that failed."""
    failed = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
    commands = [command for report in failed if (command := repeat_command(report.nodeid))]
    if commands:
        terminalreporter.section("repeat the worlds that failed", red=True)
        for command in dict.fromkeys(commands):
            terminalreporter.line(command)


class NewWorlds:
    """The hooks of a run with --worlds: seed by seed through all tests until the time is over."""

    def __init__(self, text: str, seconds: float) -> None:
        self.text, self.seconds, self.ends = text, seconds, math.inf
        self.passed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.get_closest_marker("seeds")]
        items.sort(key=lambda item: item.callspec.params["seed"])  # type: ignore[attr-defined]

    def pytest_collection_finish(self) -> None:
        self.ends = time.monotonic() + self.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self.ends else None  # True: nothing is left to do for it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.passed and session.exitstatus == pytest.ExitCode.OK:
            # time for nothing is no success
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tests = len({nodeid.split("[")[0] for nodeid in self.passed})
        seeds = len({found[1] for nodeid in self.passed if (found := SEED_IN_ID.search(nodeid))})
        terminalreporter.section("random worlds")
        terminalreporter.line(
            f"{len(self.passed)} worlds of {tests} tests passed, with {seeds} "
            f"seeds that follow from {self.text!r}"
        )
