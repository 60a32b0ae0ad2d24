"""States of a controller, and the one table of transitions between them.

A run goes down the first column of the table to its end. A failure that the run recovers from leads
from any state that has ranks to GATHERING, where the survivors leave the world that failed. From
there the run takes the same way as at its start: FILLING gives every rank without a process a new
one, or that of a spare, PLANNING says what to do, STARTING begins it. A run whose number of ranks
may change goes back to FILLING, too, when its ranks have paused for a change; there it may have to
look for room several times. Where PLANNING finds that it cannot go on with so many, it goes back to
FILLING for those that it had. In HANDING the ranks before and after the change pass tables on.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal

# result of a state: "stay" looks again, "on" goes ahead, "end" has nothing left to do, "resize" has
# ranks that paused for a change of their number, or a change of it that was called off
Turn = Literal["stay", "on", "end", "resize", "recover", "fail"]


class State(Enum):
    """State of a controller."""

    INITIALIZING = "initializing"
    SCHEDULING = "scheduling"
    FILLING = "filling"
    PLANNING = "planning"
    HANDING = "handing tables over"
    STARTING = "starting"
    RUNNING = "running"
    GATHERING = "gathering"
    SHUTTING_DOWN = "shutting down"
    FINISHED = "finished"
    ERRORED = "errored"


_FAILED: dict[Turn, State] = {"recover": State.GATHERING, "fail": State.SHUTTING_DOWN}

TRANSITIONS: Mapping[State, Mapping[Turn, State]] = {
    State.INITIALIZING: {"on": State.SCHEDULING, "fail": State.SHUTTING_DOWN},
    State.SCHEDULING: {"on": State.FILLING, "fail": State.SHUTTING_DOWN},
    State.FILLING: {"stay": State.FILLING, "on": State.PLANNING, **_FAILED},
    State.PLANNING: {
        "on": State.HANDING,
        "end": State.SHUTTING_DOWN,
        "resize": State.FILLING,
        **_FAILED,
    },
    State.HANDING: {"stay": State.HANDING, "on": State.STARTING, **_FAILED},
    State.STARTING: {"on": State.RUNNING, **_FAILED},
    State.RUNNING: {
        "stay": State.RUNNING,
        "end": State.SHUTTING_DOWN,
        "resize": State.FILLING,
        **_FAILED,
    },
    State.GATHERING: {"stay": State.GATHERING, "on": State.FILLING, **_FAILED},
    State.SHUTTING_DOWN: {"end": State.FINISHED, "fail": State.ERRORED},
}


def can_recover(state: State) -> bool:
    """Return True if a failure in this state can be recovered from, since there are ranks."""
    return "recover" in TRANSITIONS[state]
