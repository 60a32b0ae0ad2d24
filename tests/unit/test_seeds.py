"""Runs draw the seeds they should, and a world that failed is repeated by the command that is
printed.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeds import FIRST_NEW, LAST_NEW, ROUND_S, fixed_part, new_seeds, repeat_command

ROOT = Path(__file__).parents[2]
WORLDS = """
import pytest

@pytest.mark.seeds(range(10, 20))
@pytest.mark.parametrize("kind", ["a-b", "[c"])
def test_sound(seed, kind):
    pass

@pytest.mark.seeds(range(12))
def test_cursed(seed):
    assert seed < 1_000_000 or seed % 5, "a multiple of five"

def test_without_a_seed():
    pass
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A session of its own over the worlds above."""
    (folder / "test_worlds.py").write_text(WORLDS)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.seeds",
        "-o",
        "markers=seeds: worlds",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*words, *options], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )


def seeds_of(done: subprocess.CompletedProcess[str], test: str) -> list[int]:
    """The seeds that a test was given, in order."""
    lines = [line for line in done.stdout.splitlines() if re.search(r"(PASS|FAIL)ED +\[", line)]
    return [int(found[1]) for line in lines if (found := re.search(rf"{test}\[seed(\d+)", line))]


@pytest.mark.slow
def test_a_run_takes_the_first_tenth_unless_told_otherwise(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert seeds_of(done, "test_sound") == [10, 10]
    assert seeds_of(done, "test_cursed") == [0, 1] and "2 passed" not in done.stdout
    assert "test_without_a_seed PASSED" in done.stdout
    assert len(seeds_of(run(tmp_path, "--seeds", "all"), "test_cursed")) == 12
    assert seeds_of(run(tmp_path, "--seeds", "77"), "test_cursed") == [77]
    assert "is none of tenth, all and a number" in run(tmp_path, "--seeds", "some").stderr


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_new_worlds_come_seed_by_seed_and_a_failure_says_how_to_repeat_it(
    tmp_path: Path, processes: int
) -> None:
    options = ("-n", str(processes), "--worlds", "some text", "--seconds", "100")
    done = run(tmp_path, *options)
    assert done.returncode == 1 and "without_a_seed" not in done.stdout
    wanted = new_seeds("some text", 1 + math.ceil(100 * max(1, processes) / ROUND_S))
    cursed = [seed for seed in wanted if seed % 5 == 0]
    said = re.findall(r"^\S+ -m pytest .*--seeds \d+$", done.stdout, re.MULTILINE)
    assert len(said) == len(cursed) > 1
    if not processes:
        assert seeds_of(done, "test_cursed") == list(wanted)
        first = [
            line for line in done.stdout.splitlines() if " PASSED" in line or " FAILED" in line
        ][:3]
        assert all(f"seed{wanted[0]}" in line for line in first)
    again = run(tmp_path, *shlex.split(said[-1])[3:])
    assert again.returncode == 1 and "1 failed" in again.stdout
    assert "a multiple of five" in again.stdout and said[-1] in again.stdout


def test_new_worlds_end_with_their_time(tmp_path: Path) -> None:
    done = run(tmp_path, "--worlds", "some text", "--seconds", "0")
    assert "0 worlds of 0 tests passed" in done.stdout and done.returncode == 5


def test_new_seeds_follow_from_the_text_and_are_new() -> None:
    one, other = new_seeds("one", 100), new_seeds("other", 100)
    assert one == new_seeds("one", 100) and not set(one) & set(other)
    assert one[0] >= FIRST_NEW and one[-1] < LAST_NEW + 100
    assert list(fixed_part(range(5))) == [0]
    assert list(fixed_part(range(100, 111))) == [100, 101]


@pytest.mark.parametrize(
    ("nodeid", "seed"),
    [
        ("tests/a.py::test_b[seed7]", 7),
        ("tests/a.py::test_b[seed12-c-d]", 12),
        ("tests/a.py::test_b[x@y-seed12]@ray", 12),
        ("tests/a.py::test_b[seeds]", None),
        ("tests/a.py::test_b", None),
    ],
)
def test_the_seed_is_read_from_the_name_of_the_test(nodeid: str, seed: int | None) -> None:
    command = repeat_command(nodeid)
    if seed is None:
        assert command is None
    else:
        name = nodeid.removesuffix("@ray")
        assert command is not None and shlex.split(command)[3:] == [name, "--seeds", str(seed)]
