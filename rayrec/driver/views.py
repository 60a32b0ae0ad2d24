"""Views: what is known of a cluster at one look, as values.

`ray_cluster` makes them, and `decide` turns them into commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rayrec.driver.blame import Blame, Kind, silence
from rayrec.driver.roster import Place
from rayrec.errors import RayrecError
from rayrec.train.events import Event
from rayrec.train.progress import RankPoll
from rayrec.train.rank_error import RankError
from rayrec.train.seat import RankAddress

# a process describes itself, imports what a task needs, shows that it lives, fetches a task, makes
# the meeting place of the ranks, or begins the task that it fetched
Verb = Literal["describe", "warm", "probe", "take", "store", "begin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Result of a training task as far as the driver decides by it.

    Attributes:
        stopped: the task ended early because it was asked to.
        handed_over: the ranks keep their tables for those that follow.
    """

    stopped: bool
    handed_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessView:
    """A process as it is known.

    Attributes:
        poll: last answer, or None before the first; without events and result.
        pause: result of a training task, once it has ended.
        death: cause of its death in one line, or "" while it lives.
        death_at: wall clock seconds when the death was seen.
        silent_s: seconds since its last answer.
        stopped_s: seconds for which it is known to be stopped; 0 where it is not.
        is_awake: it has told that its imports are done.
    """

    poll: RankPoll | None = None
    pause: Pause | None = None
    death: str = ""
    death_at: float = 0.0
    silent_s: float = 0.0
    stopped_s: float = 0.0
    is_awake: bool = False

    def loss(self, heartbeat_s: float, silence_s: float) -> tuple[Kind, str] | None:
        """Return how the process was lost, and the cause in one line; None while it is not.

        Args:
            heartbeat_s, silence_s: seconds that it may be stopped, and silent.
        """
        if self.death:
            return "died", self.death
        if self.stopped_s >= heartbeat_s:
            return "stopped", f"its process has been stopped (SIGSTOP) for {self.stopped_s:.0f} s"
        if self.silent_s >= silence_s:
            return "silent", silence(self.silent_s)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation(ProcessView):
    """A process as rank of a world, with the address of its host."""

    rank: int
    host: str

    @property
    def error(self) -> RankError | None:
        """Error that ended its task, or None."""
        return None if self.poll is None else self.poll.error

    @property
    def own_error(self) -> RankError | None:
        """Its error, unless that blames another rank."""
        return None if self.error is None or self.error.collateral else self.error

    @property
    def has_failed(self) -> bool:
        """True if it died, or its task ended by an error."""
        return bool(self.death) or self.error is not None

    @property
    def is_done(self) -> bool:
        """True if its task ended well, also where it died since."""
        return self.poll is not None and self.poll.state == "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Answer of a process to a call.

    Attributes:
        call: number of the call.
        value: address of the process, port of the meeting place, or None.
        cause: error of the call in one line, or "". traceback: its text.
        mistake: the error itself where it is a user's mistake.
        final: trying again would fail again.
    """

    process: int
    call: int
    verb: Verb
    value: RankAddress | int | None = None
    cause: str = ""
    traceback: str = ""
    mistake: RayrecError | None = None
    final: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rooms:
    """Nodes and places of the cluster.

    Attributes:
        asked_at: steady clock seconds when the head was asked.
        alive: nodes that live.
        draining: nodes that will go, with their deadline in wall clock seconds or None.
        nodes: node of each place that Ray has given on a node that lives.
        base: Ray's word for the state of the group of the smallest number of ranks.
    """

    asked_at: float
    alive: frozenset[str] = frozenset()
    draining: Mapping[str, float | None] = field(default_factory=dict)
    nodes: Mapping[Place, str] = field(default_factory=dict)
    base: str = "unknown"


class Resources(NamedTuple):
    """Total resources of a cluster, and the free resources of each node."""

    total: Mapping[str, float]
    free: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Outcome of planning.

    Attributes:
        has_task, has_first: there is a task for the ranks, and one before it.
        refused: the planner's error in one line, or "". error: the error itself.
        failed: a rank failed meanwhile.
        given_up: the run was asked to stop meanwhile.
    """

    has_task: bool = True
    has_first: bool = False
    refused: str = ""
    error: RayrecError | None = None
    failed: Blame | None = None
    given_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The cluster at one look.

    Attributes:
        now, wall: seconds of a steady clock, and of the wall clock.
        processes: every process that was started and not ended, by number.
        replies: answers to calls since the last look.
        rooms, resources: newest answers of the cluster's head, where they were needed.
        events: events of rank 0 since it began, or since the last look; only while the ranks work.
        planned: outcome of planning, if it has ended since the last look.
        stops: the run was asked to end, by a call or a signal. signal: number of the signal.
        wish: number of ranks that somebody asked for since the last look.
    """

    now: float
    wall: float = 0.0
    processes: Mapping[int, ProcessView] = field(default_factory=dict)
    replies: tuple[Reply, ...] = ()
    rooms: Rooms | None = None
    resources: Resources | None = None
    events: tuple[Event, ...] = ()
    planned: Planned | None = None
    stops: bool = False
    signal: int | None = None
    wish: int | None = None
