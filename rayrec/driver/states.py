"""States of a run, each with the data that it needs, and the one table of what may follow what.

A run goes down the table to its end: FILLING gives every rank a place and a process, PLANNING says
what to do, STARTING begins it, RUNNING watches it. A failure that the run recovers from leads from
any of these to GATHERING, where the survivors leave the world that failed, and from there to
FILLING. Ranks that have paused for a change of their number go to FILLING, too, and so do those
for which PLANNING finds no plan: they get back what they had. In HANDING the ranks before and
after a change pass tables on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rayrec.driver.blame import Blame
from rayrec.driver.views import Verb


@dataclass(kw_only=True, slots=True)
class Filling:
    """Every rank gets a place and a process.

    Attributes:
        since: when it began; nothing that the cluster's head said before counts.
        room_since: since when places are missing, or None, and `heard_at`: when the head of the
            cluster was asked for what it said of places last. grew_at: when more came last, and
            `room`: how many there were.
        is_told: the user knows of the wait.
        probed: spares have had the time to show that they live.
        probing_until: until when they may; None before.
        calls: probes without an answer, by number, with their processes.
        deadline: until when processes may come up; None while places are missing.
        relieved: ranks that go on in the process of a spare, and `replaced`: those with a new one.
    """

    since: float = 0.0
    room_since: float | None = None
    heard_at: float | None = None
    grew_at: float = 0.0
    room: int = -1
    is_told: bool = False
    probed: bool = False
    probing_until: float | None = None
    calls: dict[int, int] = field(default_factory=dict)
    deadline: float | None = None
    relieved: set[int] = field(default_factory=set)
    replaced: set[int] = field(default_factory=set)


@dataclass(kw_only=True, slots=True)
class Planning:
    """The driver plans for the ranks that it got."""


@dataclass(kw_only=True, slots=True)
class Starting:
    """The ranks take a task, meet, and begin it, one after the other.

    Attributes:
        first: it is the task in which tables are handed over.
        verb: what they do: "take", "store" or "begin".
        calls: calls without an answer, by number, with their processes.
        deadline: until when the answers may come.
    """

    first: bool
    verb: Verb
    calls: dict[int, int] = field(default_factory=dict)
    deadline: float


@dataclass(kw_only=True, slots=True)
class Handing:
    """Ranks before and after a change pass tables on; trouble was seen first at `trouble_at`."""

    trouble_at: float | None = None


@dataclass(kw_only=True, slots=True)
class Running:
    """The ranks do their task.

    Attributes:
        trouble_at: when trouble was seen first.
        stop_at: when they were asked to end.
        growing: number of ranks once newcomers are ready, or 0; `deadline`: until when they may be.
        at_stake: they hold what may not be saved: they train, or took tables over.
    """

    at_stake: bool = False
    trouble_at: float | None = None
    stop_at: float | None = None
    growing: int = 0
    deadline: float = 0.0


@dataclass(kw_only=True, slots=True)
class Gathering:
    """Survivors of a failure, whose connections were cut, leave their world; `since` when."""

    since: float | None = None


@dataclass(kw_only=True, slots=True)
class Ended:
    """The run is over.

    Attributes:
        error: the error that ended it, or None.
        blame: instead of `error`, the failure that ended it, and `past`: those before.
        more: what to add to the failure.
    """

    error: BaseException | None = None
    blame: Blame | None = None
    past: tuple[Blame, ...] = ()
    more: str = ""


State = Filling | Planning | Starting | Handing | Running | Gathering | Ended

FOLLOWS: Mapping[type[Any], tuple[type[Any], ...]] = {
    Filling: (Filling, Planning, Gathering, Ended),
    Planning: (Starting, Filling, Gathering, Ended),
    Starting: (Handing, Running, Gathering, Ended),
    Handing: (Starting, Gathering, Ended),
    Running: (Filling, Gathering, Ended),
    Gathering: (Filling, Gathering, Ended),
    Ended: (),
}


def put_off(state: State, seconds: float) -> None:
    """Move all times of a state by seconds in which nobody looked at the cluster."""
    for each in fields(state):
        if isinstance(at := getattr(state, each.name), float):
            setattr(state, each.name, at + seconds)


def name_of(state: State) -> str:
    """Return the name of a state, for people."""
    return type(state).__name__.lower()
