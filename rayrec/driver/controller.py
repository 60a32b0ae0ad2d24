"""The controller: a small state machine that carries one task to its result.

INITIALIZING connects, SCHEDULING reserves room and starts the ranks while the task is prepared,
RUNNING polls until the verdict is finish or fail, SHUTTING_DOWN ends all that was started, and
FINISHED or ERRORED says how it went. Each state does one thing and names the next; what to do about
polls is decided in `policies`, so that recovery and resizing can come as further states and
verdicts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from typing import Any

from rayrec.driver.cluster import Cluster, connected
from rayrec.driver.config import ScalingConfig
from rayrec.driver.placement import placed
from rayrec.driver.policies import Observation, judge
from rayrec.driver.prepared import Prepared, Ran
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.rank_start import started
from rayrec.driver.run_log import RunLog
from rayrec.driver.signals import Signals, hold_signals
from rayrec.driver.stall import STALL_S, StallWatch
from rayrec.errors import TrainingFailed
from rayrec.train.progress import Event, Milestone

# between two looks at the ranks
POLL_S = 0.2
# a rank without news says so after as long
ANSWER_S = 0.5
SILENT_S = 10.0
STACKS_S = 5.0


class State(Enum):
    """Where a controller is."""

    INITIALIZING = "initializing"
    SCHEDULING = "scheduling"
    RUNNING = "running"
    SHUTTING_DOWN = "shutting down"
    FINISHED = "finished"
    ERRORED = "errored"


class RemoteTraceback(Exception):
    """The traceback of a rank, as text, chained below the error that the driver raises."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0].rstrip()}\n" if self.args else ""


class Controller:
    """Runs one task on a group of ranks.

    Args:
        scaling: how many ranks, and what each gets.
        prepare: says what to do, once the ranks' places are known and while they import torch.
        on_event: gets every report and line of the ranks and of the controller.
        timeout_s: bound on every collective.
        setup_timeout_s: bound on the start of the ranks.
        stop_timeout_s: bound on the way from a stop request to the end.
        obeys_stop: the task ends by itself when it is asked to; one that does not is ended at once
            by a signal.
        log: receives what is too long for a line; by default a file in the system's temporary
            folder.
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
        setup_timeout_s: float = 120.0,
        stop_timeout_s: float = 60.0,
        obeys_stop: bool = True,
        log: RunLog | None = None,
        on_poll: Callable[[], None] = lambda: None,
        stall_s: float = STALL_S,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.state = State.INITIALIZING
        self.log = log or RunLog(None)
        self._on_poll, self._obeys_stop = on_poll, obeys_stop
        self._on_step, self._step = on_step, 0
        self._signals = Signals()
        self._watch = StallWatch(on_event, self.log, self._rank_stacks, stall_s)
        self._progress: object = None
        self._scaling, self._prepare, self._on_event = scaling, prepare, on_event
        self._timeout_s, self._setup_timeout_s = timeout_s, setup_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._stack = ExitStack()
        self._stop = threading.Event()
        self._stop_asked_at: float | None = None
        self._trouble_since: float | None = None
        self._told_silent: set[int] = set()
        self._shown = 0
        self._cluster: Cluster | None = None
        self._group: RankGroup | None = None
        self._prepared = Prepared(None)
        self._results: tuple[Any, ...] = ()
        self._error: Exception | None = None

    def request_stop(self) -> None:
        """Ask the ranks to stop at their next agreed point; from any thread or signal handler."""
        self._stop.set()

    def run(self) -> Ran:
        """Go through all states.

        Raises:
            RayrecError: a user's mistake, found while preparing or by a rank.
            TrainingFailed: names the first rank that failed.
            RunInterrupted: a signal came before the ranks had begun. Later ones stop the ranks,
                which then return what they have.
        """
        actions: dict[State, Callable[[], State]] = {
            State.INITIALIZING: self._initialize,
            State.SCHEDULING: self._schedule,
            State.RUNNING: self._poll,
            State.SHUTTING_DOWN: self._shut_down,
        }
        self._watch.start()
        try:
            while self.state in actions:
                try:
                    self.state = actions[self.state]()
                except Exception as error:
                    # An error while ending cannot be answered by ending once more.
                    if self.state is State.SHUTTING_DOWN:
                        raise
                    self._error, self.state = error, State.SHUTTING_DOWN
        finally:
            self._watch.close()
            # does something only where an interrupt left the loop
            self._stack.close()
        if self._error is not None:
            raise self._error
        return Ran(self._prepared, self._results, self._signals.number)

    def _initialize(self) -> State:
        self._signals = self._stack.enter_context(hold_signals())
        self._watch.at("connecting to Ray")
        self._cluster = self._stack.enter_context(connected())
        # `ray.init` took SIGTERM for itself
        self._signals.install()
        self._signals.check()
        self._on_event(Milestone("connection to Ray"))
        return State.SCHEDULING

    def _schedule(self) -> State:
        assert self._cluster is not None
        check = self._signals.check
        self._watch.at("waiting for room on the cluster", patient=True)
        room = self._stack.enter_context(
            placed(self._scaling, self._cluster, self._on_event, check)
        )
        self._watch.at("starting the ranks' actors")
        group = started(self._scaling, room, self._setup_timeout_s, check)
        self._group = self._stack.enter_context(group)
        self._on_event(Milestone("actors"))
        check()
        self._watch.at("planning")
        self._prepared = self._prepare(self._group)
        task = self._prepared.task
        # Only a plan was wanted: the ranks had to exist for it, and have nothing to run.
        if task is None:
            return State.SHUTTING_DOWN
        check()
        self._on_event(Milestone("plan"))
        self._watch.at("starting the ranks, which import torch")
        self._group.start(task, self._timeout_s, self._setup_timeout_s)
        self._on_event(Milestone("torch on the ranks"))
        return State.RUNNING

    def _poll(self) -> State:
        assert self._group is not None
        self._ask_to_stop(self._group)
        self._on_poll()
        ranks = self._group.observe(POLL_S, ANSWER_S)
        self._note_progress(ranks)
        for event in self._group.events[self._shown :]:
            self._on_event(event)
        self._shown = len(self._group.events)
        self._tell_silent(ranks)
        # the cause may be heard of after its symptoms, so the verdict waits for it a moment
        if self._trouble_since is None and any(
            rank.death or (rank.poll and rank.poll.error) for rank in ranks
        ):
            self._trouble_since = time.monotonic()
        trouble_s = 0.0 if self._trouble_since is None else time.monotonic() - self._trouble_since
        verdict = judge(ranks, trouble_s, silent_limit_s=min(SILENT_S, self._timeout_s / 2))
        if verdict.action == "finish":
            self._results = tuple(rank.poll.result for rank in ranks if rank.poll is not None)
            return State.SHUTTING_DOWN
        if verdict.failure is not None:
            # the other ranks would wait in a collective until its timeout
            self._group.abort()
            failure = verdict.failure
            error = failure.error(self._group.world_size)
            if failure.traceback and isinstance(error, TrainingFailed):
                error.log = self.log.write(
                    f"rank {failure.rank} on {failure.host}:\n{failure.traceback}"
                )
            raise error from (RemoteTraceback(failure.traceback) if failure.traceback else None)
        return State.RUNNING

    def _note_progress(self, ranks: tuple[Observation, ...]) -> None:
        """Tell the watch whether any rank moved since the last look, and what they are doing."""
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
        if step > self._step:
            self._step = step
            self._on_step(step)
        self._watch.at(f"{where}, after step {step}" if step else where)

    def _rank_stacks(self) -> str:
        return self._group.stacks(STACKS_S) if self._group is not None else "-- no ranks yet"

    def _ask_to_stop(self, group: RankGroup) -> None:
        if not self._stop.is_set() and not self._signals.came:
            return
        if not self._obeys_stop:
            self._signals.check()
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
            self._on_event(
                "asked to stop; the ranks finish their window and save what the run keeps"
            )
            group.request_stop()
        elif time.monotonic() - self._stop_asked_at > self._stop_timeout_s:
            raise TrainingFailed(
                f"the ranks were asked to stop and did not in {self._stop_timeout_s:.0f} s; they "
                "were killed."
            )

    def _tell_silent(self, ranks: tuple[Observation, ...]) -> None:
        for rank in ranks:
            if rank.silent_s > SILENT_S and rank.rank not in self._told_silent:
                self._told_silent.add(rank.rank)
                self._on_event(
                    f"rank {rank.rank} on {rank.host} has not answered for {rank.silent_s:.0f} s"
                )
            elif rank.silent_s < SILENT_S:
                self._told_silent.discard(rank.rank)

    def _shut_down(self) -> State:
        self._watch.at("ending the ranks", patient=True)
        self._stack.close()
        return State.FINISHED if self._error is None else State.ERRORED
