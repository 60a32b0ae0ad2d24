"""Malloc thresholds of a rank process: large buffers that are freed and made again cost no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, threading
from rayrec.train.memory import tune_malloc
if sys.argv[1] == "tuned":
    assert tune_malloc()
import torch
def steps():
    for i in range(22):
        if i == 12:  # by then the heap has found its size
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for megabytes in (64, 7):
            torch.empty(megabytes << 20, dtype=torch.uint8).fill_(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
if sys.argv[2] == "thread":
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
else:
    steps()
"""


def faults(how: str, where: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how, where], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize("where", ["main", "thread"])
def test_reused_buffers_cost_no_page_faults(where: str) -> None:
    assert faults("shipped", where) > 1000  # 64 MiB in pages of 4 KiB, ten times
    assert any(faults("tuned", where) < 100 for _ in range(3))  # a kernel short of memory may take pages away meanwhile
