"""Malloc thresholds of a rank process: large buffers that are freed and made again cost no page faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


AMONG_THREADS = r"""
import threading, torch
from rayrec.train.memory import start_thread, tune_malloc
more = threading.Event()
for _ in range(5):  # each makes an arena of its own
    threading.Thread(target=lambda: (torch.empty(9000), more.wait()), daemon=True).start()
assert tune_malloc()
threading.Thread(target=lambda: (torch.empty(9000), more.wait()), daemon=True).start()  # has the main one: the next thread gets another
def heap(field):
    found, inside = 0, False
    for line in open("/proc/self/smaps"):
        inside = line.endswith("[heap]\n") if line[0].islower() or line[0].isdigit() else inside  # marked parts have lines of their own
        found += int(line.split()[1]) if inside and line.startswith(field) else 0
    return found
def run():
    size, huge = heap("Rss:"), heap("AnonHugePages:")
    kept = torch.empty(16 << 20, dtype=torch.uint8).fill_(1)
    print(heap("Rss:") - size, heap("AnonHugePages:") - huge)
    done.set()
done = threading.Event()
start_thread(run, "rank")
assert done.wait(60)
more.set()
for thread in threading.enumerate()[1:]:
    thread.join(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_rank_s_thread_allocates_from_the_main_arena_on_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", AMONG_THREADS], capture_output=True, text=True, timeout=120, check=True)
    grown, huge = (int(word) << 10 for word in done.stdout.split())
    assert grown >= 15 << 20
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert huge >= 12 << 20
