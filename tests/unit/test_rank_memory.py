"""Malloc thresholds of a rank process: large buffers that are freed and made again cost no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from rayrec.train.memory import tune_malloc
if sys.argv[1] == "tuned":
    assert tune_malloc()
import torch
def step():
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
for _ in range(12):  # until the heap has found its size
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_reused_buffers_cost_no_page_faults() -> None:
    assert faults("shipped") > 1000  # 64 MiB in pages of 4 KiB, ten times
    assert faults("tuned") < 100
