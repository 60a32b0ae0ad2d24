"""The check at the end of a test session finds what it is there to find, and nothing of others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.leftovers import SHM, VARIABLE, left_behind, processes_of, shared_memory, unheld

pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="looks at /proc and /dev/shm")
ORPHAN = """
import subprocess, sys
words = [sys.executable, "-c", "input()"]
none = subprocess.DEVNULL
print(subprocess.Popen(words, stdin=0, stdout=none, stderr=none, start_new_session=True).pid)
"""


def test_an_orphan_in_a_session_of_its_own_is_found() -> None:
    mark = uuid.uuid4().hex
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", ORPHAN],
            env=os.environ | {VARIABLE: mark},
            stdin=read,
            capture_output=True,
            text=True,
            timeout=60,
        )
        orphan = int(done.stdout)
        # Popen returns when exec has begun, and the kernel shows the environment a moment later
        deadline = time.monotonic() + 60
        while orphan not in processes_of(mark) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert orphan in processes_of(mark) and processes_of(uuid.uuid4().hex) == {}
        (line,) = (
            line
            for line in left_behind(mark, shared_memory(), timeout_s=0)
            if line.startswith("process")
        )
        assert f"process {orphan}: " in line and "input()" in line
    finally:
        os.close(write)  # ends the orphan's input, and so the orphan
        os.close(read)
    assert left_behind(mark, shared_memory()) == []


def test_shared_memory_counts_when_nobody_holds_it() -> None:
    before, path = shared_memory(), Path(SHM / f"rayrec-test-{uuid.uuid4().hex}")
    with path.open("wb") as file:
        file.write(b"x")
        file.flush()
        assert path.name in shared_memory() and path.name not in unheld(shared_memory())
    try:
        assert path.name in unheld(shared_memory())
        assert f"shared memory {path}" in left_behind(uuid.uuid4().hex, before, timeout_s=0)
    finally:
        path.unlink()
    assert path.name not in shared_memory()


LEAVES = """
import subprocess, sys

def test_that_leaves_a_process():
    subprocess.Popen([sys.executable, "-c", "open('pipe').read()"])

def test_beside_it():
    pass
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_session_that_leaves_a_process_fails(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    os.mkfifo(tmp_path / "pipe")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.leftovers",
        "--ending",
        "1",
        "-n",
        workers,
    ]
    end = os.open(tmp_path / "pipe", os.O_RDWR)  # the process reads until this is closed
    try:
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
        )
    finally:
        os.close(end)
    assert "2 passed" in done.stdout and done.returncode == 1
    assert "left behind by this session" in done.stdout and "open('pipe')" in done.stdout
