"""`Seat`, the position of a rank in its world, and `RankContext`, the interface of its task.

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
    """Node, host and process id of a rank."""

    node_id: str
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Position of a rank in its world.

    Attributes:
        rank, world_size: index of this rank, and number of ranks.
        host: address of its node.
        store_host, store_port: address of the rendezvous that rank 0 made.
        device: "cpu", or "cuda" for the one GPU that this process sees.
        threads: CPU threads of this rank.
        pin: index of this rank among those of its machine, and their number, where they pin
            themselves to cores; see `cores`.
        timeout_s: bound on every collective.
        generation: number of the world among those of the run.
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
    """Interface of a running task to its rank and the driver.

    Attributes:
        should_stop: returns True if the task shall end at its next agreed point.
        going_to: returns the number of ranks that the run goes on with then; 0 if it ends.
        save_asked: returns True, once per request, if the task shall save there and go on.
    """

    seat: Seat
    log: ProgressLog
    should_stop: Callable[[], bool]
    save_asked: Callable[[], bool] = lambda: False
    going_to: Callable[[], int] = lambda: 0

    @property
    def device(self) -> str:
        """Device of this rank by torch's name; a process sees one GPU."""
        return "cuda:0" if self.seat.device == "cuda" else "cpu"

    def report(self, event: Event) -> None:
        """Report an event or a line for the user; only rank 0 does, whose events are merged."""
        if self.seat.rank == 0:
            self.log.add(event)

    def mark(self, name: str) -> None:
        """Report that a part of the start-up is over, from rank 0 only."""
        self.report(Milestone(name))

    def at_step(self, step: int) -> None:
        """Record the newest finished step of this rank."""
        self.log.at_step(step)

    def phase(self, name: str) -> None:
        """Set the current phase, in words that complete "while ...", such as "saving a file"."""
        self.log.phase = name
        self.log.beats += 1
        show(name)

    def beat(self) -> None:
        """Give a sign of progress inside a phase."""
        self.log.beats += 1


class RankTask(Protocol):
    """Task that all ranks run together."""

    def run(self, context: RankContext) -> Any:
        """Run the task on this rank; the result must be plain data."""


def places_on_machines(addresses: Sequence[RankAddress]) -> list[tuple[int, int]]:
    """Return for each rank its index among the ranks of its machine, and their number."""
    # by address: two Ray nodes may share a machine
    places: list[tuple[int, int]] = []
    for address in addresses:
        machine = [rank for rank, other in enumerate(addresses) if other.host == address.host]
        places.append((machine.index(len(places)), len(machine)))
    return places
