"""Malloc of a rank process: large buffers come from the main heap, which keeps what is freed.

What that is worth, in page faults and on huge pages, depends on the machine's free memory and is
measured by the slow tests here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc only")


def run(script: str, *words: str) -> list[int]:
    """The numbers that a process of its own prints."""
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [int(word) for word in done.stdout.split()]


HEAP = """
def heap(field):
    found, inside = 0, False
    for line in open("/proc/self/smaps"):
        # the line that opens a part; a marked part has lines of its own
        if line[0].islower() or line[0].isdigit():
            inside = line.endswith("[heap]\\n")
        elif inside and line.startswith(field):
            found += int(line.split()[1]) << 10
    return found
def in_heap(tensor):
    lines = (line for line in open("/proc/self/maps") if line.endswith("[heap]\\n"))
    parts = (line.split()[0].split("-") for line in lines)
    return any(int(first, 16) <= tensor.data_ptr() < int(last, 16) for first, last in parts)
"""

BUFFERS = """
import sys, threading
from rayrec.machine.memory import tune_malloc
if sys.argv[1] == "tuned":
    assert tune_malloc()
import torch
def steps():
    inside = []
    for megabytes in (64, 7, 64, 7, 64, 7):
        inside.append(in_heap(torch.empty(megabytes << 20, dtype=torch.uint8).fill_(1)))
    print(sum(inside), heap("Size:"))
thread = threading.Thread(target=steps)
thread.start()
thread.join()
steps()
"""


@pytest.mark.slow
def test_freed_buffers_stay_in_the_heap_and_are_used_again() -> None:
    """Six times 64 and 7 MB, in another thread and in the main one."""
    thread, grown, main, size = run(HEAP + BUFFERS, "tuned")
    assert thread == main == 6
    # 256 MB are its first part, which huge pages are asked for; twelve buffers side by side would
    # be 850 MB
    assert 256 << 20 <= grown <= size < 456 << 20, "the heap shrank, or grew with every buffer"
    inside, _, also_inside, _ = run(HEAP + BUFFERS, "shipped")
    assert inside == 0 and also_inside <= 3  # 64 MB are always mapped anew


PIECES = """
import gc
from rayrec.machine.memory import give_back, resident_bytes, tune_malloc
assert tune_malloc()
import torch
torch.empty(9000)
before = resident_bytes()
pieces = [torch.empty(256 << 10, dtype=torch.uint8).fill_(1) for _ in range(400)]
del pieces[:-1]  # the last one holds the heap's end
held = resident_bytes()
gc.disable()
cycle = [torch.empty(8 << 20, dtype=torch.uint8).fill_(1)]
cycle.append(cycle)
del cycle
give_back()
print(held - before, resident_bytes() - before)
"""


@pytest.mark.slow
def test_free_pieces_and_cycles_are_given_back() -> None:
    held, left = run(PIECES)
    assert held > 90 << 20 and left < 8 << 20


FAULTS = """
import resource, sys, threading
from rayrec.machine.memory import tune_malloc
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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["main", "thread"])
def test_reused_buffers_cost_no_page_faults(where: str) -> None:
    assert run(FAULTS, "shipped", where)[-1] > 1000  # 64 MiB in pages of 4 KiB, ten times
    # a kernel short of memory may take pages away meanwhile
    assert any(run(FAULTS, "tuned", where)[-1] < 100 for _ in range(3))


AMONG_THREADS = """
import sys, threading, torch
from rayrec.machine.memory import one_thread, start_thread, tune_malloc
more = threading.Event()
for _ in range(5):  # each makes an arena of its own
    threading.Thread(target=lambda: (torch.empty(9000), more.wait()), daemon=True).start()
assert tune_malloc()
# has the main one: the next thread gets another
threading.Thread(target=lambda: (torch.empty(9000), more.wait()), daemon=True).start()
def run():
    huge = heap("AnonHugePages:")
    kept = torch.empty(16 << 20, dtype=torch.uint8).fill_(1)
    marked = any(line.startswith("VmFlags:") and " hg" in line for line in open("/proc/self/smaps"))
    print(int(in_heap(kept)), int(marked), heap("AnonHugePages:") - huge)
    done.set()
done = threading.Event()
if sys.argv[1:] == ["pool"]:
    one_thread("read").submit(run)
else:
    start_thread(run, "rank", huge_pages=True)
assert done.wait(60)
more.set()
for thread in threading.enumerate()[1:]:
    thread.join(60)
"""


def test_a_rank_s_thread_allocates_from_the_main_arena_which_asks_for_huge_pages() -> None:
    in_heap, marked, _ = run(HEAP + AMONG_THREADS)
    assert in_heap and marked


@pytest.mark.slow
def test_a_pool_s_thread_allocates_from_the_main_arena() -> None:
    assert run(HEAP + AMONG_THREADS, "pool")[0]


@pytest.mark.slow
def test_the_main_arena_gets_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("no huge pages here")
    assert max(run(HEAP + AMONG_THREADS)[-1] for _ in range(3)) >= 12 << 20
