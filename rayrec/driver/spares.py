"""Spare ranks, as values: the stage of each, and the choice of a spare for each lost rank.

A spare is a process of a rank that has imported torch and waits for a rank to be lost. It holds
room on the cluster as a rank does. On the node of the lost rank it changes nothing but the process,
so the run goes on with the same plan, and with what the node keeps in memory. On another node it is
taken only where the lost rank's node is gone, since the ranks then lie otherwise on the nodes.

No Ray and no clock here; `spare_pool` does what is decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple

# between two attempts to start a spare that dies again and again
LONGEST_PAUSE_S = 60.0

# the cluster gave it a place, or took it back; its process was made, told that torch is imported,
# or died; a rank took what it has, and left it the place of its own
Sign = Literal["placed", "unplaced", "started", "told", "died", "taken"]


class Stage(Enum):
    """Stage of a spare's start."""

    ASKED = "its place is asked for"
    VACANT = "it has a place and no process"
    STARTING = "its process imports torch"
    WARM = "it waits"


NEXT: Mapping[Stage, Mapping[Sign, Stage]] = {
    Stage.ASKED: {"placed": Stage.VACANT},
    Stage.VACANT: {"unplaced": Stage.ASKED, "started": Stage.STARTING, "taken": Stage.VACANT},
    Stage.STARTING: {"told": Stage.WARM, "died": Stage.VACANT, "taken": Stage.VACANT},
    Stage.WARM: {"died": Stage.VACANT, "taken": Stage.VACANT},
}

# the best first; also without a process, a place saves the wait for one
_USEFUL = (Stage.WARM, Stage.STARTING, Stage.VACANT)


class Standby(NamedTuple):
    """Facts of a spare that decide if it can replace a lost rank.

    Attributes:
        stage: stage of its start.
        node: node of its place; "" where it has none.
    """

    stage: Stage
    node: str


def substitutes(
    lost: Mapping[int, str],
    spares: Sequence[Standby],
    alive: Collection[str],
    busy: Collection[str],
    *,
    roam: bool,
) -> dict[int, int]:
    """Return the number of the spare that replaces each lost rank; a rank may get none.

    Args:
        lost: ranks without a process, and the node that each one was on.
        spares: spares that are alive.
        alive: nodes that live. busy: nodes with ranks that live.
        roam: a spare of another node may serve where the lost rank's node is gone.
    """
    free = dict(enumerate(spares))
    chosen: dict[int, int] = {}
    # A rank whose node lives can only use the spares there, so it comes before the others.
    for rank in sorted(lost, key=lambda rank: (lost[rank] not in alive, rank)):
        node = lost[rank]
        if node in alive:
            fit = [n for n, s in free.items() if s.node == node and s.stage is not Stage.VACANT]
        else:
            fit = [n for n, s in free.items() if roam and s.node in alive]
        fit = [n for n in fit if free[n].stage in _USEFUL]
        if fit:
            # A node without ranks comes first: the ranks may then be spread as before.
            best = min(fit, key=lambda n: (_USEFUL.index(free[n].stage), free[n].node in busy))
            chosen[rank] = best
            del free[best]
    return chosen


def home(ranks: Sequence[str], spares: Sequence[str]) -> str:
    """Return the node for the next spare: the one with the most ranks for each of its spares.

    Args:
        ranks: the node of every rank. spares: the nodes that earlier spares are wanted on.
    """
    return max(dict.fromkeys(ranks), key=lambda node: ranks.count(node) / (1 + spares.count(node)))


def pause_s(deaths: int) -> float:
    """Seconds until a spare is started again, after so many deaths since it last was warm."""
    return min(LONGEST_PAUSE_S, 2.0 ** (deaths - 1))
