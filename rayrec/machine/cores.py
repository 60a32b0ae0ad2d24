"""Pins the ranks of a machine to cores of their own; who gets which is a pure function.

A rank gets as many cores as it has threads, with all their hyperthreads while the cores last; where
there are more threads than cores, it gets as many hyperthreads, neighbours on a core first. Its
cores are of one NUMA node where any has room. Every rank works this out by itself from what the
kernel tells all of them, so nothing is exchanged; that holds while all ranks of the machine may run
on the same processors, and none of another run is pinned there. Linux only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rayrec.errors import ConfigError

_SYSTEM = Path("/sys/devices/system")


class Processor(NamedTuple):
    """One hyperthread; ordered as they are handed out. `core` is its core's first processor."""

    node: int
    core: int
    number: int


def processors(allowed: Iterable[int], system: Path = _SYSTEM) -> list[Processor]:
    """The topology of some processors, as the kernel tells it.

    Args:
        allowed: their numbers.
        system: the folder that holds cpu/cpu0/ and so on; what it does not tell is taken for cores
            of their own on one node.
    """
    threads = []
    for number in allowed:
        folder = system / "cpu" / f"cpu{number}"
        nodes = [int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")]
        try:
            siblings = (folder / "topology" / "thread_siblings_list").read_text()
        except OSError:
            siblings = str(number)
        core = int(siblings.replace("-", ",").split(",")[0])
        threads.append(Processor(min(nodes, default=0), core, number))
    return sorted(threads)


def assign_cores(topology: Sequence[Processor], threads: Sequence[int]) -> list[frozenset[int]]:
    """Disjoint processors for every rank of a machine.

    Args:
        topology: processors that the ranks may use.
        threads: number of threads of each rank.
    Raises:
        ConfigError: they ask for more than there is.
    """
    cores = [list(same) for _, same in groupby(sorted(topology), key=lambda p: (p.node, p.core))]
    units = cores if sum(threads) <= len(cores) else [[p] for core in cores for p in core]
    if sum(threads) > len(units):
        raise ConfigError(
            f"{len(threads)} ranks of {', '.join(map(str, threads))} threads cannot be pinned to "
            f"{len(units)} processors; start fewer ranks on each machine, lower cpus_per_worker, "
            "or leave pin_cores out."
        )
    free = {node: list(of_node) for node, of_node in groupby(units, key=lambda unit: unit[0].node)}
    assigned = []
    for wanted in threads:
        whole = [node for node, left in free.items() if len(left) >= wanted]
        order = whole[:1] or sorted(free, key=lambda node: -len(free[node]))
        taken: list[list[Processor]] = []
        for node in order:
            count = wanted - len(taken)
            taken += free[node][:count]
            free[node] = free[node][count:]
        assigned.append(frozenset(p.number for unit in taken for p in unit))
    return assigned


def usable_processors() -> int:
    """Number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def pinned(rank: int, threads: Sequence[int]) -> Iterator[frozenset[int]]:
    """Keep all threads of this process on the cores of one rank inside the block.

    Args:
        rank: this rank's number among those of its machine.
        threads: number of threads of each of them.
    Raises:
        ConfigError: there are too few cores, or this is not Linux.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("pin_cores needs Linux; leave it out.")
    before = os.sched_getaffinity(0)
    mine = assign_cores(processors(before), threads)[rank]
    _move(mine)
    try:
        yield mine
    finally:
        _move(before)


def _move(to: Iterable[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
            os.sched_setaffinity(int(thread.name), to)
