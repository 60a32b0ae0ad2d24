"""Commands: what a run has done on its cluster, as values, and what it tells its user.

`decide` makes them, and `ray_cluster` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.driver.blame import Blame
from rayrec.driver.roster import Place
from rayrec.driver.views import Verb
from rayrec.train.events import Event
from rayrec.train.seat import Seat as RankSeat

# the task of the ranks, or the one before it in which ranks hand tables over
Which = Literal["main", "first"]
# what the next look asks the head of the cluster
Need = Literal["rooms", "resources"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Ask the cluster for a placement group; `near` is the node that one place is wanted on."""

    group: int
    bundles: int = 1
    strategy: str = "PACK"
    near: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveBack:
    """Give a placement group back."""

    group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartProcess:
    """Start a process at a place; it describes itself with the call of this number."""

    process: int
    place: Place
    call: int
    is_spare: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EndProcess:
    """End a process, whatever it does."""

    process: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Call a process."""

    process: int
    call: int
    verb: Verb
    which: Which = "main"
    host: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Have a process begin the task that it has taken."""

    process: int
    call: int
    seat: RankSeat


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Plan for the ranks in these processes, whose tables may be handed over."""

    processes: tuple[int, ...]
    handed_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Keep the results of the ranks, which have saved and go on as another world."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Ask a task to stop at its next agreed point, to go on with other ranks or, with 0, to end."""

    process: int
    going_to: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Ask a task to save at its next agreed point and to go on."""

    process: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """Cut the connections of a process to the world of a generation."""

    process: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tell:
    """Pass an event on to whoever listens."""

    event: Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Keep the traceback of a failure in the run's log."""

    blame: Blame


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """Say where the run is, for who watches for stalls; `patient` where waiting is expected."""

    where: str
    patient: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportStep:
    """Report the newest finished step."""

    step: int


Command = (
    Ask
    | GiveBack
    | StartProcess
    | EndProcess
    | Call
    | Begin
    | Plan
    | Keep
    | Stop
    | Save
    | Abort
    | Tell
    | Log
    | At
    | ReportStep
)
