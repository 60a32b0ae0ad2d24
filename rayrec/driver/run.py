"""`Run`: all that the driver knows of one run, as one value that `decide` changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

from rayrec.driver.cluster import Cluster
from rayrec.driver.commands import At, Command, Need, ReportStep, StartProcess, Tell
from rayrec.driver.recovery import Recovery
from rayrec.driver.roster import Place, Role, Roster, Seat, Stage
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.sizing import Sizing
from rayrec.driver.states import Ended, Filling, State
from rayrec.driver.views import Observation, ProcessView, View

UNKNOWN, NOT_STARTED = ProcessView(), ProcessView(death="it was not started")
PRIVATE = Cluster(private=True, fixed=True)
# silence of a rank that is told
SILENT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What does not change during a run.

    Attributes:
        scaling: number and resources of the ranks.
        cluster: the connection to Ray.
        here: node of the driver.
        timeout_s: bound on every collective.
        heartbeat_s: a rank that says nothing for so long is lost.
        setup_timeout_s: bound on each part of the start of the ranks.
        stop_timeout_s: bound on the way from a stop request to the end.
        max_failures: number of failures that the run recovers from; -1 for any number.
        max_preemptions: the same of ranks that were lost with nodes that were announced to go.
        resizes: the ranks may change on the way. keeps: the run keeps checkpoints.
        obeys_stop: the task ends by itself when it is asked to; one that does not is ended at once
            by a signal.
    """

    scaling: ScalingConfig
    cluster: Cluster = PRIVATE
    here: str = ""
    timeout_s: float = 300.0
    heartbeat_s: float = 30.0
    setup_timeout_s: float = 120.0
    stop_timeout_s: float = 60.0
    max_failures: int = 0
    max_preemptions: int = -1
    resizes: bool = False
    keeps: bool = False
    obeys_stop: bool = True


@dataclass(kw_only=True, slots=True)
class Preemption:
    """What a run did so far about nodes that will go; the rule is `preemption.answer_to`.

    Attributes:
        since: when the notice of each node came.
        told: nodes, each with an answer that was told of it.
        last: nodes before whose end the last save was asked for.
    """

    since: dict[str, float] = field(default_factory=dict)
    told: set[tuple[str, str]] = field(default_factory=set)
    last: set[str] = field(default_factory=set)


class RunProgress:
    """Progress of the ranks of one run in words, for the watch on stalls, and who is silent.

    Attributes:
        step: newest finished step of this attempt.
        trains: a step was finished in this attempt.
    """

    def __init__(self) -> None:
        self._progress: object = None
        self._told_silent: set[int] = set()
        self.step = 0
        self.trains = False

    def go_back(self, step: int) -> None:
        """Reset to an earlier step, from which the run goes on."""
        self.step = step
        self.trains = False
        self._told_silent.clear()

    def see(self, ranks: Sequence[Observation]) -> Iterator[Command]:
        """Record progress since the last look; yield the phase of the ranks, and lines."""
        yield from self._tell_silent(ranks)
        polls = [rank.poll for rank in ranks]
        progress = [(p.state, p.phase, p.step, p.beats) if p is not None else None for p in polls]
        # Answers without news are no progress, or a run that hangs would look alive.
        if progress == self._progress:
            return
        self._progress = progress
        doing: dict[str, list[str]] = {}
        for rank, poll in enumerate(polls):
            what = "starting" if poll is None else poll.phase or poll.state
            doing.setdefault(what, []).append(str(rank))
        if len(doing) == 1:
            where = f"all ranks are {next(iter(doing))}"
        else:
            where = "; ".join(f"rank {', '.join(who)} is {what}" for what, who in doing.items())
        step = max((poll.step for poll in polls if poll is not None), default=0)
        if step > self.step:
            self.step = step
            self.trains = True
            yield ReportStep(step=step)
        yield At(where=f"{where}, after step {step}" if step else where)

    def _tell_silent(self, ranks: Sequence[Observation]) -> Iterator[Command]:
        for rank in ranks:
            if rank.silent_s > SILENT_S and rank.rank not in self._told_silent:
                self._told_silent.add(rank.rank)
                silent_s = f"{rank.silent_s:.0f} s"
                yield Tell(event=f"rank {rank.rank} on {rank.host} has not answered for {silent_s}")
            elif rank.silent_s < SILENT_S:
                self._told_silent.discard(rank.rank)


@dataclass(kw_only=True, slots=True)
class Run:
    """A run as it stands.

    Attributes:
        roster: its seats.
        generation: number of worlds that the ranks have formed.
        handed_over: the ranks keep the tables of a world that has ended.
        has_result: ranks that paused have saved, and the results of their task are kept; no other
            ranks have ended it since.
        former: places of the ranks when they paused for a change, and `goes_back`: True if they go
            back there.
        calls: numbers for calls of processes.
        needs: what the next look shall ask the cluster's head. asked_at: when it was asked last
            while the ranks worked.
        short_s: seconds for which spares had no room; None once the user knows.
        wanted_since: the number of ranks that has no room, and since when; no time once that was
            told.
        hurries: the next decision needs no answer of the ranks.
        looked_at: time of the newest view.
    """

    rules: Rules
    state: State = field(default_factory=Filling)
    roster: Roster = field(default_factory=Roster)
    recovery: Recovery = field(default_factory=Recovery)
    sizing: Sizing
    preemption: Preemption = field(default_factory=Preemption)
    progress: RunProgress
    generation: int = 0
    handed_over: bool = False
    has_result: bool = False
    former: tuple[Place, ...] = ()
    goes_back: bool = False
    calls: Iterator[int] = field(default_factory=partial(count, 1))
    needs: frozenset[Need] = frozenset({"rooms", "resources"})
    asked_at: float = 0.0
    short_s: float | None = 0.0
    wanted_since: tuple[int, float | None] = (0, None)
    hurries: bool = True
    looked_at: float = inf

    @classmethod
    def of(cls, rules: Rules) -> Run:
        """Return a run that has not begun."""
        scaling = rules.scaling
        sizing = Sizing(grow_after_s=scaling.grow_after_s, wanted=scaling.most)
        return cls(rules=rules, sizing=sizing, progress=RunProgress())

    @property
    def has_ended(self) -> bool:
        """True once nothing is left to decide."""
        return isinstance(self.state, Ended)

    @property
    def places(self) -> list[Place]:
        """Place of each rank."""
        return [seat.place for seat in self.roster.ranks]

    @property
    def setup_s(self) -> float:
        """Seconds that a part of the start may take now."""
        return self.rules.setup_timeout_s * self.recovery.patience

    @property
    def silence_s(self) -> float:
        """Seconds without an answer after which a process counts as lost now."""
        return self.rules.heartbeat_s * self.recovery.patience

    def start_process(self, seat: Seat) -> StartProcess:
        """Put a new process into a seat, and return the command that starts it."""
        seat.process, seat.address = next(self.roster.processes), None
        seat.stage = Stage.STARTING
        return StartProcess(
            process=seat.process,
            place=seat.place,
            call=next(self.calls),
            is_spare=seat.role is Role.SPARE,
        )

    def joint(self) -> list[Seat]:
        """Return the seats of the ranks before and after a change; those after it come first."""
        return self.roster.of(Role.RANK, Role.LEAVER)

    def observe(self, view: View, seats: Iterable[Seat]) -> tuple[Observation, ...]:
        """Return what is known of the processes of some seats, as ranks of one world."""
        found = []
        for rank, seat in enumerate(seats):
            seen = view.processes.get(seat.process, UNKNOWN) if seat.process else NOT_STARTED
            found.append(
                Observation(
                    rank=rank,
                    host=seat.host,
                    poll=seen.poll,
                    death=seen.death,
                    death_at=seen.death_at or view.wall,
                    silent_s=seen.silent_s,
                )
            )
        return tuple(found)
