"""The controller: it looks at the cluster, decides, and has done what was decided, until the end.

What follows from what is seen stands in `decide`, which is pure; what Ray is asked stands in
`ray_cluster`. Here is the loop between the two, and the one error or result that it ends with.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from rayrec.driver.blame import Blame
from rayrec.driver.cluster import connected
from rayrec.driver.commands import At, Command, Log, ReportStep, Tell
from rayrec.driver.decide import decide
from rayrec.driver.rank_group import Prepared, Ran, RankGroup
from rayrec.driver.ray_cluster import RayCluster
from rayrec.driver.replay import Look, recording
from rayrec.driver.run import Rules, Run
from rayrec.driver.run_log import STALL_S, RunLog, StallWatch
from rayrec.driver.states import Ended
from rayrec.errors import RayrecError, TrainingFailed
from rayrec.machine.signals import Signals, hold_signals
from rayrec.train.events import Event, Milestone

STACKS_S = 5.0


class Controller:
    """Runs one task on a group of ranks.

    Args:
        rules: rules of the run; the connection to Ray and the driver's node are added.
        prepare: makes the task, once the ranks' places are known and while they import torch;
            called again after every failure that the run recovers from.
        on_event: receives every report and line of the ranks and of the controller.
        stop: any thread sets it to ask the ranks to stop at their next agreed point.
        log: receives tracebacks and stacks; by default a temporary file.
        on_poll: called at every look at the ranks; its error ends the run.
        on_step: receives the newest finished step whenever it has changed.
        stall_s: seconds without progress after which the run says where it stands.
        record_in: folder of the run that gets a log of what was seen and decided, or None.
    Attributes:
        standing: the run as it stands, once the cluster is joined.
    """

    standing: Run | None = None

    def __init__(
        self,
        rules: Rules,
        prepare: Callable[[RankGroup], Prepared],
        on_event: Callable[[Event], None] = lambda event: None,
        *,
        stop: threading.Event | None = None,
        log: RunLog | None = None,
        on_poll: Callable[[], None] = lambda: None,
        stall_s: float = STALL_S,
        on_step: Callable[[int], None] = lambda step: None,
        record_in: str | None = None,
    ) -> None:
        self.rules, self._prepare, self._on_event = rules, prepare, on_event
        self._stop, self._wishes = stop or threading.Event(), deque[int]()
        self._log = log or RunLog(None)
        self._on_poll, self._on_step, self._record_in = on_poll, on_step, record_in
        self._watch = StallWatch(on_event, self._log, self._rank_stacks, stall_s)
        self._cluster: RayCluster | None = None

    def resize(self, ranks: int) -> None:
        """Wish for another number of ranks, between least and most; from any thread."""
        self._wishes.append(ranks)

    def run(self) -> Ran:
        """Carry the task to its result.

        Raises:
            RayrecError: a user's mistake, found while preparing or by a rank.
            TrainingFailed: names the first rank that failed.
            RunInterrupted: a signal came before the ranks had begun. Later ones stop the ranks,
                which then return what they have.
        """
        self._watch.start()
        self._watch.at("connecting to Ray")
        with ExitStack() as stack:
            stack.callback(self._watch.close)
            signals = stack.enter_context(hold_signals())
            return self._run(signals, stack)

    def _run(self, signals: Signals, stack: ExitStack) -> Ran:
        import ray

        connection = stack.enter_context(connected())
        # `ray.init` took SIGTERM for itself
        signals.install()
        signals.check()
        self._on_event(Milestone("connection to Ray"))
        here = ray.get_runtime_context().get_node_id()
        run = self.standing = Run.of(replace(self.rules, cluster=connection, here=here))
        record = None
        if self._record_in is not None:
            record = stack.enter_context(recording(self._record_in))
            record(run.rules)
        cluster = self._cluster = RayCluster(
            run, self._prepare, signals, self._stop, self._on_event
        )
        stack.callback(cluster.close)
        stack.callback(self._watch.at, "ending the ranks", patient=True)
        while not run.has_ended:
            wish = self._wishes.popleft() if self._wishes else None
            view = cluster.look(wish=wish)
            self._on_poll()
            commands = decide(run, view)
            if record is not None:
                record(Look.of(view, run, commands))
            self._do(cluster, commands)
        assert isinstance(run.state, Ended)
        if run.state.blame is not None:
            raise ending(run.state, run.state.blame, len(run.roster.ranks), self._log)
        if run.state.error is not None:
            raise run.state.error
        prepared, results = cluster.outcome()
        return Ran(prepared, results, signals.number, run.recovery, run.sizing.resizes)

    def _do(self, cluster: RayCluster, commands: Sequence[Command]) -> None:
        """Have commands carried out; those to the user are carried out here, in their order."""
        for command in commands:
            match command:
                case Tell():
                    self._on_event(command.event)
                case At():
                    self._watch.at(command.where, patient=command.patient)
                case ReportStep():
                    self._on_step(command.step)
                case Log():
                    write_traceback(command.blame, self._log)
                case _:
                    cluster.do(command)

    def _rank_stacks(self) -> str:
        cluster = self._cluster
        return cluster.stacks(STACKS_S) if cluster is not None else "-- no ranks yet"


class RemoteTraceback(Exception):
    """The traceback of a rank, as text, chained below the error that the driver raises."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0].rstrip()}\n" if self.args else ""


def write_traceback(blame: Blame, log: RunLog) -> str:
    """Keep the traceback of a failure in the run's log; where it can be read, or ""."""
    if not blame.traceback:
        return ""
    return log.write(f"rank {blame.rank} on {blame.host}:\n{blame.traceback}")


def ending(end: Ended, blame: Blame, world_size: int, log: RunLog) -> RayrecError:
    """Return the error to raise for a failure that ends a run; `log` receives its traceback."""
    words = [blame.also, end.more]
    if end.past:
        first = end.past[0]
        times = f"{len(end.past)} failure" + ("s" if len(end.past) > 1 else "")
        words.append(
            f"the run had recovered from {times}, the first of rank {first.rank}: {first.cause}"
        )
    also = "; ".join(word for word in words if word)
    error = replace(blame, also=also).error(world_size)
    if isinstance(error, TrainingFailed):
        error.log = write_traceback(blame, log)
    if blame.traceback:
        error.__cause__ = RemoteTraceback(blame.traceback)
    return error
