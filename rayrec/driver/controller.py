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
from collections.abc import Callable
from contextlib import ExitStack

from rayrec.driver.assignment import Assignment
from rayrec.driver.blame import Blame
from rayrec.driver.cluster import Cluster, connected
from rayrec.driver.failing import Failing
from rayrec.driver.head import head
from rayrec.driver.placed import Placed
from rayrec.driver.preemption import PreemptionWatch
from rayrec.driver.prepared import Prepared, Ran
from rayrec.driver.progress import RunProgress
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.recovery import Recovery
from rayrec.driver.resizing import Resizing
from rayrec.driver.run_log import RunLog
from rayrec.driver.run_placement import run_placement
from rayrec.driver.running import Running
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.sizing import Sizing
from rayrec.driver.spare_pool import spare_pool
from rayrec.driver.stall import STALL_S, StallWatch
from rayrec.driver.states import TRANSITIONS, State, Turn, can_recover
from rayrec.driver.stopping import Stopping
from rayrec.driver.table_transfer import Judging, TableTransfer
from rayrec.driver.worker_group import worker_group
from rayrec.errors import USER_MISTAKES, ConfigError, TrainingFailed
from rayrec.machine.signals import hold_signals
from rayrec.train.events import Event, Milestone

STACKS_S = 5.0
HEARTBEAT_S = 30.0


class Controller:
    """Runs one task on a group of ranks.

    Args:
        scaling: number and resources of the ranks.
        prepare: makes the task, once the ranks' places are known and while they import torch;
            called again after every failure that the run recovers from.
        on_event: receives every report and line of the ranks and of the controller.
        timeout_s: bound on every collective.
        heartbeat_timeout_s: a rank that says nothing for so long is lost.
        setup_timeout_s: bound on the start of the ranks.
        stop_timeout_s: bound on the way from a stop request to the end.
        max_failures: number of failures that the run recovers from; -1 for any number.
        keeps: the task can save and go on when its node will be drained; see `preemption`.
        resizes: the number of ranks may change on the way; see `ScalingConfig.num_workers`.
        obeys_stop: the task ends by itself when it is asked to; one that does not is ended at once
            by a signal.
        log: receives tracebacks and stacks; by default a temporary file.
        on_poll: called at every look at the ranks; its error ends the run.
        on_step: receives the newest finished step whenever it has changed.
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
        self._progress = RunProgress(self._watch, on_event, on_step)
        self._recovery = Recovery()
        self._failing = Failing(self._recovery, self.log, max_failures)
        self.resizes, self._keeps, self._sizing = resizes, keeps, Sizing.of(scaling)
        self._scaling, self._prepare, self._on_event = scaling, prepare, on_event
        self._timeout_s, self._setup_timeout_s = timeout_s, setup_timeout_s
        self._heartbeat_s = heartbeat_timeout_s
        self._stack = ExitStack()
        self._judging = Judging(timeout_s, heartbeat_timeout_s, self._recovery)
        heard = self._stopping, self._progress, self._recovery, self._judging
        self._running = Running(*heard, on_event, resizes=resizes)
        self._cluster: Cluster | None = None
        self._placed: Placed | None = None
        self._prepared = Prepared(None)
        self._error: Exception | None = None

    def request_stop(self) -> None:
        """Ask the ranks to stop at their next agreed point; from any thread or signal handler."""
        self._stopping.want()

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
        number, resizes = self._stopping.signals.number, self._sizing.resizes
        return Ran(self._prepared, self._running.results, number, self._recovery, resizes)

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
        check, tell, watch, sizing = self._check, self._on_event, self._watch, self._sizing
        watch.at("waiting for room on the cluster", patient=True)
        enter, scaling = self._stack.enter_context, self._scaling
        placement = enter(run_placement(scaling, self._cluster, tell, check))
        spares = enter(spare_pool(scaling, self._heartbeat_s, self._setup_timeout_s, tell))
        workers = enter(worker_group(scaling, placement.places(), check))
        assignment = Assignment(scaling, placement, workers, spares, sizing, self._recovery, watch)
        preemption = PreemptionWatch(scaling, placement, workers, sizing, self._keeps)
        assignment.say_how_many(tell)
        self._placed = Placed(
            workers=workers,
            group=RankGroup(workers, scaling, check, self._judging.silence_s),
            assignment=assignment,
            resizing=Resizing(assignment, preemption, sizing),
            transfer=TableTransfer(workers, scaling, check, self._judging),
        )
        return "on"

    @property
    def placed(self) -> Placed:
        """Ranks and their managers; set once SCHEDULING is over."""
        assert self._placed is not None
        return self._placed

    def _fill(self) -> Turn:
        """Give a process to every rank that has none."""
        setup_s = self._setup_timeout_s * self._recovery.patience
        if not self.placed.assignment.fill(setup_s, part=not self.placed.group.handed_over):
            return "stay"
        self._on_event(Milestone("actors"))
        return "on"

    def _check(self) -> None:
        """Obey a signal, unless ranks keep tables that nobody has saved: they stop later."""
        head.look(self._on_event)
        if self._placed is None or not self._placed.group.handed_over:
            self._stopping.signals.check()

    def _plan(self) -> Turn:
        group = self.placed.group
        self._check()
        self._watch.at("planning")
        try:
            self._prepared = self._prepare(group)
        except USER_MISTAKES as error:
            # the ranks are as they were, and their tables are still there
            self._on_event(self.placed.resizing.call_off(error, group.world_size))
            return "resize"
        # Only a plan was wanted: the ranks had to exist for it, and have nothing to run.
        if self._prepared.task is None:
            return "end"
        self._check()
        self._on_event(Milestone("plan"))
        return "on"

    def _hand_over(self) -> Turn:
        """Have the ranks before and after a change of their number pass tables on."""
        task = self._prepared.first
        if task is None:
            return "on"
        self._watch.at("passing tables on to the ranks that follow")
        verdict = self.placed.transfer.look(task, self._timeout_s, self._setup_timeout_s)
        if verdict.failure is not None:
            return self._failed(verdict.failure)
        if verdict.action != "finish":
            return "stay"
        self.placed.assignment.part()
        self._on_event(Milestone("tables passed on"))
        return "on"

    def _start(self) -> Turn:
        assert self._prepared.task is not None
        group = self.placed.group
        self._watch.at("starting the ranks, which import torch")
        setup_s = self._setup_timeout_s * self._recovery.patience
        group.start(self._prepared.task, self._timeout_s, setup_s)
        self._running.begin()
        group.handed_over = False
        self._stopping.begin()
        self._sizing.start()
        self._on_event(Milestone("torch on the ranks"))
        return "on"

    def _poll(self) -> Turn:
        head.look(self._on_event)
        self._on_poll()
        found = self._running.look(self.placed)
        return self._failed(found) if isinstance(found, Blame) else found

    def _gather(self) -> Turn:
        """Have the survivors leave the world that failed, and end the processes that do not."""
        if self._failing.is_new:
            self._watch.at("waiting for the other ranks to leave the world that failed")
        self._check()
        self._on_poll()
        placed, now = self.placed, time.monotonic()
        return "on" if self._failing.have_left(placed.group, placed.workers, now) else "stay"

    def _raised(self, error: Exception) -> Turn:
        """Answer an error of a state; only the failure of a rank may be recovered from."""
        if isinstance(error, TrainingFailed) and error.rank is not None and can_recover(self.state):
            return self._failed(Blame.of(error, self._progress.step), error)
        if isinstance(error, ConfigError) and self.state is State.FILLING:
            error = self._failing.not_replaced(error, self.placed.group.world_size)
        self._error = error
        return "fail"

    def _failed(self, blame: Blame, error: Exception | None = None) -> Turn:
        """Recover from a failure, or end the run with it; `error` is it as it was raised here."""
        placed, step, stops = self.placed, self._progress.step, self._stopping.wanted
        if told := self._failing.recovers(blame, step, time.monotonic(), is_stopping=stops):
            placed.group.handed_over = False
            placed.transfer.give_up()
            placed.assignment.give_up()
            self._on_event(told)
            return "recover"
        # the other ranks would wait in a collective until its timeout
        (placed.transfer.joint or placed.group).abort()
        self._error = self._failing.error(blame, step, placed.group.world_size, error)
        return "fail"

    def _rank_stacks(self) -> str:
        return self._placed.group.stacks(STACKS_S) if self._placed else "-- no ranks yet"

    def _shut_down(self) -> Turn:
        self._watch.at("ending the ranks", patient=True)
        self._stack.close()
        return "end" if self._error is None else "fail"
