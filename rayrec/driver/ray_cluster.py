"""`RayCluster`: looks at a Ray cluster for a run, and does there what the run has decided.

All of Ray is behind three calls: `look` returns what is known, `do` carries out commands, `close`
ends and gives back whatever the run has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from signal import SIGTERM
from typing import Any

from rayrec.driver.blame import RankTrouble
from rayrec.driver.commands import (
    Abort,
    Ask,
    Begin,
    Call,
    Command,
    EndProcess,
    GiveBack,
    Keep,
    Plan,
    Save,
    StartProcess,
    Stop,
    Which,
)
from rayrec.driver.head import head
from rayrec.driver.placement import NOTICE_AFTER_S
from rayrec.driver.processes import Processes
from rayrec.driver.rank_group import Prepared, RankGroup
from rayrec.driver.rank_process import stacks_of
from rayrec.driver.rooms import PlacementGroups
from rayrec.driver.run import Run
from rayrec.driver.states import Running
from rayrec.driver.views import Planned, View
from rayrec.errors import USER_MISTAKES, RunInterrupted
from rayrec.machine.signals import Signals
from rayrec.train.events import Event

POLL_S = 0.2


class RayCluster:
    """Ray cluster of one run.

    Args:
        run: the run as it stands.
        prepare: makes the task of the ranks, once their places are known.
        signals: signals that this process received during the run.
        stop: set where the run was asked to end.
        say: receives lines about the head of the cluster.
    Attributes:
        prepared: newest task of the ranks.
        processes: processes of the run.
    """

    def __init__(
        self,
        run: Run,
        prepare: Callable[[RankGroup], Prepared],
        signals: Signals,
        stop: threading.Event,
        say: Callable[[Event], None],
    ) -> None:
        self._run, self._prepare, self._signals, self._say = run, prepare, signals, say
        self._stop, self.prepared = stop, Prepared(None)
        self._kept = self.prepared, tuple[Any, ...]()
        self.processes = Processes(run.rules.scaling)
        self._groups = PlacementGroups(run.rules.scaling.bundle)
        self._view = View(now=time.monotonic())
        self._tasks: dict[Which, Any] = {}
        self._planned: Planned | None = None
        self._ranks: RankGroup | None = None

    def look(self, *, wish: int | None = None) -> View:
        """Return what is known of the cluster after a short wait for news.

        Args:
            wish: number of ranks that was asked for.
        Raises:
            ClusterError: nothing listens at the address of the cluster's head any more.
        """
        head.look(self._say)
        self.processes.look(0.0 if self._run.hurries else POLL_S)
        rooms, resources = self._view.rooms, self._view.resources
        if "rooms" in self._run.needs:
            rooms = self._groups.rooms() or rooms
        if "resources" in self._run.needs:
            resources = self._groups.resources() or resources
        planned, self._planned = self._planned, None
        self._view = View(
            now=time.monotonic(),
            wall=time.time(),
            processes=self.processes.views,
            replies=self.processes.take_replies(),
            rooms=rooms,
            resources=resources,
            # a rank may tell of its task before the last one has told that it began
            events=self.processes.take_events() if isinstance(self._run.state, Running) else (),
            planned=planned,
            stops=self._stop.is_set() or self._signals.came,
            signal=self._signals.number,
            wish=wish,
        )
        return self._view

    def do(self, command: Command) -> None:
        """Carry out a command to the cluster."""
        match command:
            case Ask():
                self._groups.ask(command)
            case GiveBack():
                self._groups.give_back(command.group)
            case StartProcess():
                self.processes.start(command, self._groups.group(command.place.group))
            case EndProcess():
                self.processes.end(command.process)
            case Call():
                self.processes.call(command, self._task(command.which))
            case Begin():
                self.processes.begin(command)
            case Abort():
                self.processes.abort(command.process, command.generation)
            case Stop():
                self.processes[command.process].actor.request_stop.remote(command.going_to)
            case Save():
                self.processes[command.process].actor.request_save.remote()
            case Keep():
                self._kept = self._newest()
            case Plan():
                self._planned = self._plan()

    def outcome(self) -> tuple[Prepared, tuple[Any, ...]]:
        """Return the task that ranks ended last, and the result of each; none without one."""
        return self._kept if self._run.has_result else self._newest()

    def _newest(self) -> tuple[Prepared, tuple[Any, ...]]:
        seats = self._run.roster.ranks if self.prepared.task is not None else []
        results = (self.processes[s.process].result for s in seats if s.process is not None)
        return self.prepared, tuple(results)

    def stacks(self, timeout_s: float) -> str:
        """Return the stacks of all ranks as text."""
        ranks = self._ranks
        return stacks_of(ranks.actors, ranks.addresses, timeout_s) if ranks else "-- no ranks yet"

    def close(self) -> None:
        """End all processes, and give all places back."""
        self.processes.close()
        self._groups.close()

    def _plan(self) -> Planned:
        """Have the task of the ranks prepared."""
        self._ranks = RankGroup(self._run, self.processes, self._check)
        try:
            self.prepared = self._prepare(self._ranks)
        except USER_MISTAKES as error:
            return Planned(refused=str(error) or type(error).__name__, error=error)
        except RankTrouble as trouble:
            return Planned(failed=trouble.blame)
        except RunInterrupted:
            return Planned(given_up=True)
        # the references keep tasks in the object store, which has each once for all ranks
        self._tasks.clear()
        prepared = self.prepared
        return Planned(has_task=prepared.task is not None, has_first=prepared.first is not None)

    def _check(self) -> None:
        """Obey a signal, and a request to stop where the head is silent.

        Ranks that keep tables which nobody has saved stop later.
        """
        head.look(self._say)
        waits = head.silent_s >= NOTICE_AFTER_S
        if not self._run.handed_over and (self._signals.came or (self._stop.is_set() and waits)):
            raise RunInterrupted(self._signals.number or SIGTERM)

    def _task(self, which: Which) -> Any:
        """Return the Ray reference of a task."""
        import ray

        if which not in self._tasks:
            task = self.prepared.first if which == "first" else self.prepared.task
            self._tasks[which] = ray.put(task)
        return self._tasks[which]
