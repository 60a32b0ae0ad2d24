"""The controller: a small state machine that carries one task to its result.

INITIALIZING connects, SCHEDULING reserves room, FILLING gives every rank its process, PLANNING says
what they are to do, STARTING begins it, RUNNING polls. After a failure that the run recovers from,
GATHERING has the survivors leave the world that failed, and the run goes on at FILLING. It goes on
there, too, when its ranks have paused for a change of their number. Each state does one thing;
`states.TRANSITIONS` says which follows, and what to make of polls and failures is decided in
`policies`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rayrec.driver.bench import bench_for
from rayrec.driver.changing import Changing
from rayrec.driver.cluster import Cluster, connected
from rayrec.driver.ending import ending, write_traceback
from rayrec.driver.handing import ANSWER_S, POLL_S, Handing, Judging
from rayrec.driver.leaving import Leaving
from rayrec.driver.policies import Blame, Observation, answer, to_replace
from rayrec.driver.prepared import Prepared, Ran
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.rank_start import Crew, crew_of
from rayrec.driver.recovery import Recovery
from rayrec.driver.room import room_for
from rayrec.driver.run_log import RunLog
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.seating import Seating
from rayrec.driver.sizing import Sizing
from rayrec.driver.stall import STALL_S, StallWatch
from rayrec.driver.standing import Standing
from rayrec.driver.states import TRANSITIONS, State, Turn, can_recover
from rayrec.driver.stopping import Stopping
from rayrec.errors import USER_MISTAKES, ConfigError, TrainingFailed
from rayrec.machine.signals import hold_signals
from rayrec.train.told import Began, Event, Milestone

LEAVING_S = 0.05
STACKS_S = 5.0
HEARTBEAT_S = 30.0


class Controller:
    """Runs one task on a group of ranks.

    Args:
        scaling: how many ranks, and what each gets.
        prepare: says what to do, once the ranks' places are known and while they import torch;
            called again after every failure that the run recovers from.
        on_event: gets every report and line of the ranks and of the controller.
        timeout_s: bound on every collective.
        heartbeat_timeout_s: a rank that says nothing for so long is lost.
        setup_timeout_s: bound on the start of the ranks.
        stop_timeout_s: bound on the way from a stop request to the end.
        max_failures: how many failures the run recovers from; -1 for any number.
        keeps: the task saves, too, when it is asked to save and go on; see `leaving`.
        resizes: the task saves when it is asked to stop, so that its ranks may be more or fewer
            afterwards; see `ScalingConfig.num_workers`.
        obeys_stop: the task ends by itself when it is asked to; one that does not is ended at once
            by a signal.
        log: receives what is too long for a line; by default a temporary file.
        on_poll: called at every look at the ranks; what it raises ends the run.
        on_step: gets the newest finished step at every look after which it is another.
        stall_s: seconds without progress after which the run says where it stands.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        prepare: Callable[[RankGroup], Prepared],
        on_event: Callable[[Event], None] = lambda event: None,
        *,
        timeout_s: float = 300.0,
        heartbeat_timeout_s: float = HEARTBEAT_S,
        setup_timeout_s: float = 120.0,
        stop_timeout_s: float = 60.0,
        max_failures: int = 0,
        resizes: bool = False,
        keeps: bool = False,
        obeys_stop: bool = True,
        log: RunLog | None = None,
        on_poll: Callable[[], None] = lambda: None,
        stall_s: float = STALL_S,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.state = State.INITIALIZING
        self.log = log or RunLog(None)
        self._on_poll = on_poll
        self._stopping = Stopping(on_event, stop_timeout_s, obeys_stop)
        self._watch = StallWatch(on_event, self.log, self._rank_stacks, stall_s)
        self._standing = Standing(self._watch, on_event, on_step)
        self._recovery = Recovery()
        self._resizes, self._keeps, self._sizing = resizes, keeps, Sizing.of(scaling)
        self._scaling, self._prepare, self._on_event = scaling, prepare, on_event
        self._timeout_s, self._setup_timeout_s = timeout_s, setup_timeout_s
        self._heartbeat_s, self._max_failures = heartbeat_timeout_s, max_failures
        self._stack = ExitStack()
        self._judging = Judging(timeout_s, heartbeat_timeout_s)
        self._cut_at: float | None = None
        self._shown = 0
        self._cluster: Cluster | None = None
        self._crew: Crew | None = None
        self._seating: Seating | None = None
        self._changing: Changing | None = None
        self._group: RankGroup | None = None
        self._handing: Handing | None = None
        self._prepared = Prepared(None)
        self._results: tuple[Any, ...] = ()
        self._error: Exception | None = None

    def request_stop(self) -> None:
        """Ask the ranks to stop at their next agreed point; from any thread or signal handler."""
        self._stopping.want()

    @property
    def resizes(self) -> bool:
        """Whether the number of ranks may change on the way."""
        return self._resizes

    def resize(self, ranks: int) -> None:
        """Wish for another number of ranks, between least and most; from any thread."""
        self._sizing.ask(ranks)

    def run(self) -> Ran:
        """Go through all states.

        Raises:
            RayrecError: a user's mistake, found while preparing or by a rank.
            TrainingFailed: names the first rank that failed.
            RunInterrupted: a signal came before the ranks had begun. Later ones stop the ranks,
                which then return what they have.
        """
        actions: dict[State, Callable[[], Turn]] = {
            State.INITIALIZING: self._initialize,
            State.SCHEDULING: self._schedule,
            State.FILLING: self._fill,
            State.PLANNING: self._plan,
            State.HANDING: self._hand_over,
            State.STARTING: self._start,
            State.RUNNING: self._poll,
            State.GATHERING: self._gather,
            State.SHUTTING_DOWN: self._shut_down,
        }
        self._watch.start()
        try:
            while self.state in actions:
                try:
                    turn = actions[self.state]()
                except Exception as error:
                    # An error while ending cannot be answered by ending once more.
                    if self.state is State.SHUTTING_DOWN:
                        raise
                    turn = self._raised(error)
                self.state = TRANSITIONS[self.state][turn]
        finally:
            self._watch.close()
            # does something only where an interrupt left the loop
            self._stack.close()
        if self._error is not None:
            raise self._error
        return Ran(
            self._prepared,
            self._results,
            self._stopping.signals.number,
            self._recovery,
            self._sizing.resizes,
        )

    def _initialize(self) -> Turn:
        signals = self._stack.enter_context(hold_signals())
        self._stopping.signals = signals
        self._watch.at("connecting to Ray")
        self._cluster = self._stack.enter_context(connected())
        # `ray.init` took SIGTERM for itself
        signals.install()
        signals.check()
        self._on_event(Milestone("connection to Ray"))
        return "on"

    def _schedule(self) -> Turn:
        assert self._cluster is not None
        check = self._check
        self._watch.at("waiting for room on the cluster", patient=True)
        enter, scaling = self._stack.enter_context, self._scaling
        room = enter(room_for(scaling, self._cluster, self._on_event, check))
        bench = enter(bench_for(scaling, self._heartbeat_s, self._setup_timeout_s, self._on_event))
        self._crew = enter(crew_of(scaling, room.places(), check))
        self._seating = Seating(
            scaling, room, self._crew, bench, self._sizing, self._recovery, self._watch
        )
        self._handing = Handing(self._crew, scaling, self._check, self._heartbeat_s, self._judging)
        leaving = Leaving(scaling, room, self._crew, self._sizing, self._keeps)
        self._changing = Changing(self._seating, leaving, self._sizing)
        self._seating.say_how_many(self._on_event)
        self._group = RankGroup(self._crew, self._scaling, check, self._heartbeat_s)
        return "on"

    def _fill(self) -> Turn:
        """Give a process to every rank that has none."""
        assert self._seating is not None
        part = self._group is None or not self._group.handed_over
        if not self._seating.fill(self._setup_timeout_s, self._heartbeat_s, part=part):
            return "stay"
        self._on_event(Milestone("actors"))
        return "on"

    def _check(self) -> None:
        """Obey a signal, unless ranks keep tables that nobody has saved: they stop later."""
        if self._group is None or not self._group.handed_over:
            self._stopping.signals.check()

    def _plan(self) -> Turn:
        assert self._group is not None
        self._check()
        self._watch.at("planning")
        try:
            self._prepared = self._prepare(self._group)
        except USER_MISTAKES as error:
            assert self._changing is not None
            # the ranks are as they were, and their tables are still there
            self._on_event(self._changing.call_off(error, self._group.world_size))
            return "resize"
        # Only a plan was wanted: the ranks had to exist for it, and have nothing to run.
        if self._prepared.task is None:
            return "end"
        self._check()
        self._on_event(Milestone("plan"))
        return "on"

    def _hand_over(self) -> Turn:
        """Have the ranks before and after a change of their number pass tables on."""
        assert self._handing is not None and self._seating is not None
        task = self._prepared.first
        if task is None:
            return "on"
        self._watch.at("passing tables on to the ranks that follow")
        verdict = self._handing.look(task, self._timeout_s, self._setup_timeout_s)
        if verdict.failure is not None:
            return self._failed(verdict.failure)
        if verdict.action != "finish":
            return "stay"
        self._seating.part()
        self._on_event(Milestone("tables passed on"))
        return "on"

    def _start(self) -> Turn:
        assert self._group is not None and self._prepared.task is not None
        self._watch.at("starting the ranks, which import torch")
        self._group.start(self._prepared.task, self._timeout_s, self._setup_timeout_s)
        self._shown = 0
        self._judging.begin()
        self._group.handed_over = False
        self._stopping.begin()
        self._sizing.start()
        self._on_event(Milestone("torch on the ranks"))
        return "on"

    def _poll(self) -> Turn:
        assert self._group is not None
        self._stopping.ask(self._group)
        self._on_poll()
        ranks = self._group.observe(POLL_S, ANSWER_S)
        self._tell(self._group)
        self._standing.see(ranks)
        now = time.monotonic()
        self._recovery.at_step(self._standing.step, now)
        verdict = self._judging.of(ranks)
        if verdict.action == "finish":
            self._results = tuple(rank.poll.result for rank in ranks if rank.poll is not None)
            assert self._changing is not None
            first = self._results[0] if self._resizes else None
            if first and self._changing.have_paused(first, is_stopping=self._stopping.wanted):
                self._group.handed_over = first.handed_over
                return "resize"
            self._recovery.caught_up(now)
            return "end"
        if verdict.failure is not None:
            return self._failed(verdict.failure)
        self._look_ahead(self._group, ranks, now)
        return "stay"

    def _look_ahead(self, group: RankGroup, ranks: Sequence[Observation], now: float) -> None:
        """Keep spares, and begin a change of the ranks where one is due."""
        assert self._seating is not None and self._changing is not None
        if not self._resizes or self._stopping.wanted:
            return
        # what starts beside ranks that are on their way slows them
        if self._standing.trains and not self._recovery.under_way:
            self._seating.stand_by(group.task, now)
        for told in self._changing.look(group, ranks, self._standing.step, now):
            self._on_event(told)

    def _tell(self, group: RankGroup) -> None:
        """Hand on what the ranks told since the last look."""
        news, self._shown = group.events[self._shown :], len(group.events)
        for event in news:
            if isinstance(event, Began):
                now, lost = time.monotonic(), self._recovery.under_way
                for told in self._recovery.began(event, now):
                    self._on_event(told)
                assert self._changing is not None
                changed = self._changing.began(event, group.world_size, now, lost=lost)
                if changed is not None:
                    self._on_event(changed)
                self._standing.go_back(event.step)
            self._on_event(event)

    def _gather(self) -> Turn:
        """Have the survivors leave the world that failed, and end the processes that do not."""
        assert self._group is not None and self._crew is not None
        now = time.monotonic()
        if self._cut_at is None:
            self._watch.at("waiting for the other ranks to leave the world that failed")
            self._cut_at = now
            self._group.forget()
        self._stopping.signals.check()
        self._on_poll()
        # again and again: a rank may have opened connections since
        self._group.abort()
        ranks = self._group.observe(POLL_S, LEAVING_S, events=False)
        lost, waiting = to_replace(ranks, now - self._cut_at, self._recovery.past[-1])
        if waiting:
            return "stay"
        for rank in lost:
            self._crew.dismiss(rank)
        self._cut_at = None
        return "on"

    def _raised(self, error: Exception) -> Turn:
        """Answer an error of a state; only the failure of a rank may be recovered from."""
        if isinstance(error, TrainingFailed) and error.rank is not None and can_recover(self.state):
            return self._failed(Blame.of(error, self._standing.step), error)
        first = self._recovery.first_cause
        if first is not None and isinstance(error, ConfigError) and self.state is State.FILLING:
            error = self._ending(first, f"it could not be replaced: {error}")
        self._error = error
        return "fail"

    def _failed(self, blame: Blame, error: Exception | None = None) -> Turn:
        """Recover from a failure, or end the run with it; `error` is it as it was raised here."""
        assert self._group is not None
        # ranks that had not begun again know of no step
        if self._recovery.under_way and not blame.step:
            blame = replace(blame, step=self._standing.step)
        past = self._recovery.past
        if answer(blame, past, self._max_failures, self._stopping.wanted) == "recover":
            write_traceback(blame, self.log)
            self._group.handed_over = False
            if self._handing is not None and self._seating is not None:
                self._handing.give_up()
                self._seating.give_up()
            self._on_event(self._recovery.failed(blame, time.monotonic()))
            self._cut_at = None
            return "recover"
        # the other ranks would wait in a collective until its timeout
        joint = None if self._handing is None else self._handing.joint
        (joint or self._group).abort()
        as_it_is = error is not None and not past
        self._error = error if as_it_is else self._ending(blame)
        return "fail"

    def _ending(self, blame: Blame, more: str = "") -> Exception:
        past = [old for old in self._recovery.past if old is not blame]
        ranks = self._group.world_size if self._group is not None else self._scaling.least
        return ending(blame, ranks, past, self.log, more)

    def _rank_stacks(self) -> str:
        return self._group.stacks(STACKS_S) if self._group is not None else "-- no ranks yet"

    def _shut_down(self) -> Turn:
        self._watch.at("ending the ranks", patient=True)
        self._stack.close()
        return "end" if self._error is None else "fail"
