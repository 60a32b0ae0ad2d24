"""Where a rank sits in its world (`Seat`), and what a task of a rank is given (`RankContext`).

A task is a picklable object with `run(context)`; `FitTask` and `EvaluateTask` are those of this
package, and a job may bring its own, as the cluster's smoke test does. Inside `run` the default
process group of the process is the world of all ranks. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rayrec.train.events import Event, Milestone
from rayrec.train.progress import ProgressLog, show


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAddress:
    """Where a rank's process lives."""

    node_id: str
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A rank's place in its world.

    Attributes:
        rank, world_size: this rank of so many.
        host: address of its node.
        store_host, store_port: the rendezvous that rank 0 made.
        device: "cpu", or "cuda" for the one GPU that this process sees.
        threads: CPU threads of this rank.
        pin: this rank's number among those of its machine, and how many they are, where they pin
            themselves to cores; see `cores`.
        timeout_s: bound on every collective.
        generation: counts the worlds of one run.
    """

    rank: int
    world_size: int
    host: str
    store_host: str
    store_port: int
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    pin: tuple[int, int] | None = None
    timeout_s: float = 300.0
    generation: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """What a running task may use of its surroundings.

    Attributes:
        should_stop: whether the task shall end at its next agreed point.
        going_to: with how many ranks the run goes on after that; 0 where it ends.
        save_asked: whether it shall save there and go on; each wish is told once.
    """

    seat: Seat
    log: ProgressLog
    should_stop: Callable[[], bool]
    save_asked: Callable[[], bool] = lambda: False
    going_to: Callable[[], int] = lambda: 0

    def report(self, event: Event) -> None:
        """Make an event known; only rank 0's reach the user, since they are merged already."""
        if self.seat.rank == 0:
            self.log.add(event)

    def note(self, text: str) -> None:
        """Say a line to the user; of rank 0 only."""
        if self.seat.rank == 0:
            self.log.add(text)

    def mark(self, name: str) -> None:
        """Note that a part of the start-up is over; of rank 0 only."""
        if self.seat.rank == 0:
            self.log.add(Milestone(name))

    def at_step(self, step: int) -> None:
        """Remember how far this rank is."""
        self.log.at_step(step)

    def phase(self, name: str) -> None:
        """Say what this rank does now, in words that complete "while ...": "saving a file"."""
        self.log.phase = name
        self.log.beats += 1
        show(name)

    def beat(self) -> None:
        """Give a sign of progress inside a phase."""
        self.log.beats += 1


class RankTask(Protocol):
    """A piece of work that all ranks do together."""

    def run(self, context: RankContext) -> Any:
        """Do it; what is returned must be plain data."""


def places_on_machines(addresses: Sequence[RankAddress]) -> list[tuple[int, int]]:
    """Per rank its number among the ranks of its machine, and how many they are."""
    # by address: two Ray nodes may share a machine
    places: list[tuple[int, int]] = []
    for address in addresses:
        machine = [rank for rank, other in enumerate(addresses) if other.host == address.host]
        places.append((machine.index(len(places)), len(machine)))
    return places
