"""Ranks get disjoint cores by the machine's topology, and a pinned process runs there and nowhere
else.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rayrec.comm.process_group import create_store
from rayrec.errors import ConfigError
from rayrec.machine.cores import Processor, assign_cores, pinned, processors
from rayrec.train.seat import Seat
from rayrec.train.world import joined


def write_topology(system: Path) -> None:
    """2 sockets x 4 cores x 2 hyperthreads as Linux numbers them: first threads of all cores, then
    second ones; a node per socket.
    """
    for number in range(16):
        core = number % 8
        folder = system / "cpu" / f"cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / "thread_siblings_list").write_text(f"{core},{core + 8}\n")
        (folder / f"node{core // 4}").mkdir()


@pytest.mark.parametrize(
    ("allowed", "threads", "wanted"),
    [
        (range(16), [1, 1], [{0, 8}, {1, 9}]),
        (range(16), [4, 4], [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        # no rank over two nodes
        (range(16), [3, 3, 1, 1], [{0, 1, 2, 8, 9, 10}, {4, 5, 6, 12, 13, 14}, {3, 11}, {7, 15}]),
        # no node has two cores left
        (range(16), [3, 3, 2], [{0, 1, 2, 8, 9, 10}, {4, 5, 6, 12, 13, 14}, {3, 11, 7, 15}]),
        (range(16), [6, 2], [{0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13}, {6, 7, 14, 15}]),
        # more threads than cores
        (range(16), [8, 8], [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]),
        (range(16), [3, 6], [{0, 8, 1}, {4, 12, 5, 13, 6, 14}]),
        (range(8), [2, 2], [{0, 1}, {2, 3}]),  # second hyperthreads belong to others
        ([1, 5, 9], [1, 1], [{1, 9}, {5}]),
    ],
)
def test_two_sockets_of_four_cores_of_two_threads(tmp_path: Path, allowed, threads, wanted) -> None:
    write_topology(tmp_path)
    assert assign_cores(processors(allowed, tmp_path), threads) == wanted


@pytest.mark.seeds(range(50))
def test_every_rank_gets_cores_of_its_own(seed: int) -> None:
    rng = random.Random(seed)
    smt, cores = rng.choice([1, 2]), rng.randint(1, 12)
    node = [rng.choice([0, 0, 1]) for _ in range(cores)]
    topology = [Processor(node[c], c, c + cores * t) for c in range(cores) for t in range(smt)]
    threads = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
    if sum(threads) > len(topology):
        with pytest.raises(
            ConfigError, match=rf"{len(threads)} ranks.*{len(topology)} processors.*pin_cores"
        ):
            assign_cores(topology, threads)
        return
    found = assign_cores(topology, threads)
    assert len(frozenset().union(*found)) == sum(map(len, found)), (
        "a processor is given to two ranks"
    )
    for wanted, mine in zip(threads, found, strict=True):
        assert (
            len({p.core for p in topology if p.number in mine} if sum(threads) <= cores else mine)
            == wanted
        )


def test_the_kernel_that_tells_nothing_has_cores_on_one_node(tmp_path: Path) -> None:
    assert processors([3, 1], tmp_path) == [Processor(0, 1, 1), Processor(0, 3, 3)]


RANK = """
import os, sys, threading
from rayrec.machine.cores import pinned
stop = threading.Event()
old = threading.Thread(target=stop.wait)
old.start()
before = os.sched_getaffinity(0)
with pinned(int(sys.argv[1]), [1, 1]) as mine:
    threads = {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}
    assert threads == {mine}, (threads, mine)
    print(*mine)
tasks = os.listdir("/proc/self/task")
assert {frozenset(os.sched_getaffinity(int(t))) for t in tasks} == {frozenset(before)}
stop.set()
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two processors",
)
def test_two_processes_pin_all_their_threads_apart() -> None:
    found = []
    for rank in "01":
        done = subprocess.run(
            [sys.executable, "-c", RANK, rank], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        found.append({int(word) for word in done.stdout.split()})
    assert found[0] and found[1] and not found[0] & found[1]


def test_too_many_ranks_change_nothing() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="pin_cores"), pinned(0, [len(before) + 1]):
        pass
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two processors",
)
def test_a_rank_is_pinned_while_it_is_in_its_world() -> None:
    before = os.sched_getaffinity(0)
    store = create_store("127.0.0.1")
    seat = Seat(
        rank=0,
        world_size=1,
        host="127.0.0.1",
        store_host="127.0.0.1",
        store_port=store.port,
        pin=(1, 2),
    )
    with joined(seat, store):
        assert os.sched_getaffinity(0) == assign_cores(processors(before), [1, 1])[1]
    assert os.sched_getaffinity(0) == before
