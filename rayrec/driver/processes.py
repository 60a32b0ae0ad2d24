"""`Processes`: the processes of a run as Ray actors, what they were asked, and what they say.

Every process is polled from its birth to its end, so that one heartbeat notices a stopped one at
any time. An answer is a value; a death is one line; nothing here decides what follows from them.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rayrec.driver.commands import Begin, Call, StartProcess
from rayrec.driver.head import head, lost_calls
from rayrec.driver.policies import LONGEST_TURN_S
from rayrec.driver.rank_process import death_line, end_process, start_process, told
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.spares import BEAT_S
from rayrec.driver.stop_watch import HERE_AFTER_S, StopWatch
from rayrec.driver.views import Pause, ProcessView, Reply, Verb
from rayrec.train.events import Event
from rayrec.train.outcome import FitOutcome
from rayrec.train.progress import RankPoll
from rayrec.train.seat import RankAddress

# a process without news says so after as long; not sooner, since work beside it holds up all ranks
ANSWER_S = 0.5
# between two questions to a process whose task has ended
IDLE_S = 1.0
# how long processes may take to free memory, when they are about to be ended
FREE_S = 1.0


@dataclass(kw_only=True, slots=True, eq=False)
class Process:
    """One process.

    Attributes:
        actor: Ray's handle, once the head knows it. born: its start, while it is under way.
        address: its address, once it or the head has told it.
        view: what is known of it.
        watch: looks at it while it is silent.
        poll: reference of the poll that it owes, or None. begins: it owes the answer to a start.
        seen: number of events that were read. answered_at: time of its last answer.
        result: result of its task.
    """

    is_spare: bool
    birth: StartProcess
    born: Future[Any] | None = None
    actor: Any = None
    address: RankAddress | None = None
    view: ProcessView = field(default_factory=ProcessView)
    watch: StopWatch = field(default_factory=StopWatch)
    poll: Any = None
    begins: bool = False
    seen: int = 0
    answered_at: float = 0.0
    result: Any = None

    def dies(self, cause: str) -> None:
        """Record its death, with the cause in one line."""
        self.view = replace(self.view, death=cause, death_at=time.time())


class Processes:
    """Processes of one run.

    Attributes:
        keeps_memory: hosts keep the memory of ranks until the run ends.
        teller: process whose events speak for all ranks, since its reports are merged.
    """

    keeps_memory = False
    teller: int | None = None

    def __init__(self, scaling: ScalingConfig) -> None:
        self._scaling = scaling
        self._all: dict[int, Process] = {}
        self._calls: dict[Any, tuple[int, int, Verb]] = {}
        self._looked_at = time.monotonic()
        self._replies: list[Reply] = []
        self._events: list[Event] = []

    def __getitem__(self, number: int) -> Process:
        return self._all[number]

    @property
    def views(self) -> dict[int, ProcessView]:
        """What is known of each process."""
        return {number: process.view for number, process in self._all.items()}

    def take_replies(self) -> tuple[Reply, ...]:
        """Return the replies to calls since the last time."""
        replies, self._replies = tuple(self._replies), []
        return replies

    def take_events(self) -> tuple[Event, ...]:
        """Return the events of the teller since the last time."""
        events, self._events = tuple(self._events), []
        return events

    def start(self, start: StartProcess, group: Any) -> None:
        """Start a process at a place, which imports torch at once and describes itself."""
        process = Process(birth=start, is_spare=start.is_spare)
        # the head is given the actor's class first
        make = partial(start_process, self._scaling, group, start.place.bundle)
        process.born = head.aside(make)
        self._all[start.process] = process
        self._see_born(process)

    def end(self, number: int) -> None:
        """End a process, whatever it does."""
        process = self._all.pop(number)
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] != number}
        if process.actor is not None:
            end_process(process.actor, process.address)
        elif process.born is not None:
            process.born.add_done_callback(_end_born)

    def call(self, call: Call, task: Any) -> None:
        """Call a process."""
        process = self._all[call.process]
        actor = process.actor
        # a spare that takes the place of a rank answers as ranks do
        process.is_spare = process.is_spare and call.verb != "take"
        asked = {
            "warm": lambda: actor.stand_by.remote([task]),
            "probe": lambda: actor.poll.remote(sys.maxsize, 0.0),
            "take": lambda: actor.take.remote([task]),
            "store": lambda: actor.create_store.remote(call.host),
        }[call.verb]()
        self._calls[asked] = (call.process, call.call, call.verb)

    def begin(self, begin: Begin) -> None:
        """Have a process begin the task that it took; what it said of an earlier one is void."""
        process = self._all[begin.process]
        process.poll, process.begins, process.seen, process.result = None, True, 0, None
        process.view = replace(process.view, poll=None, pause=None, silent_s=0.0, stopped_s=0.0)
        if begin.seat.rank == 0:
            self.teller, self._events = begin.process, []
        self._calls[process.actor.start.remote(begin.seat)] = (begin.process, begin.call, "begin")

    def look(self, timeout_s: float) -> None:
        """Poll all processes that owe no answer, wait a moment, and take what was answered."""
        import ray

        for number, process in self._all.items():
            self._see_born(process)
            self._ask(number, process)
        urgent = [
            ref
            for ref, (number, _, verb) in self._calls.items()
            if verb != "warm" and not (verb == "describe" and self._all[number].is_spare)
        ]
        polls = {p.poll: number for number, p in self._all.items() if p.poll is not None}
        awaited = urgent or [ref for ref, n in polls.items() if not self._all[n].is_spare]
        if awaited:
            ray.wait(awaited, num_returns=len(awaited), timeout=timeout_s)
        else:
            time.sleep(timeout_s)
        everything = [*self._calls, *polls]
        ready = []
        if everything:
            ready, _ = ray.wait(everything, num_returns=len(everything), timeout=0)
        now = time.monotonic()
        # a driver that was stopped itself must not take its own sleep for the silence of its ranks
        turn_s, self._looked_at = min(now - self._looked_at, LONGEST_TURN_S), now
        for reference in ready:
            if reference in self._calls:
                self._take_reply(reference, *self._calls.pop(reference))
            else:
                self._take_poll(polls[reference], reference, now)
        for process in self._all.values():
            if process.poll is not None or process.begins:
                self._see_silence(process, turn_s)

    def abort(self, number: int, generation: int) -> None:
        """Cut the connections of a process to a world."""
        process = self._all.get(number)
        if process is not None and process.actor is not None:
            process.actor.abort.remote(generation)

    def close(self) -> None:
        """End all processes, and free the memory that their hosts keep for them."""
        import ray

        actors = [p.actor for p in self._all.values() if p.actor is not None]
        # A host that none of them answers for frees it by itself after a minute.
        freed = [actor.free_memory.remote() for actor in actors if self.keeps_memory]
        if freed:
            ray.wait(freed, num_returns=len(freed), timeout=FREE_S)
        for process in self._all.values():
            if process.actor is not None:
                ray.kill(process.actor, no_restart=True)
            elif process.born is not None:
                process.born.add_done_callback(_end_born)
        self._all.clear()
        self._calls.clear()

    def _see_born(self, process: Process) -> None:
        """Take the handle of a process whose start was told to the head, and have it describe."""
        if process.born is None or not process.born.done():
            return
        try:
            process.actor = process.born.result()
        except lost_calls() as error:
            process.dies(f"Ray did not start it: {error}")
        process.born = None
        if process.actor is not None:
            start = process.birth
            self._calls[process.actor.describe.remote()] = (start.process, start.call, "describe")

    def _see_silence(self, process: Process, turn_s: float) -> None:
        """Count the seconds of a process without an answer, and those that it is stopped."""
        silent_s = process.view.silent_s + turn_s
        # a spare that waits is silent for longer
        odd_s = silent_s - BEAT_S * process.is_spare
        stopped = False
        if odd_s < HERE_AFTER_S:
            # what was seen before its last answer is void
            process.watch = StopWatch()
        elif process.address is None:
            process.address = process.watch.address(process.actor)
        else:
            stopped = process.watch.is_stopped(process.address, odd_s)
        stopped_s = process.view.stopped_s + turn_s if stopped else 0.0
        process.view = replace(process.view, silent_s=silent_s, stopped_s=stopped_s)

    def _ask(self, number: int, process: Process) -> None:
        """Poll a process that owes no answer."""
        view = process.view
        if process.actor is None or process.poll is not None or process.begins or view.death:
            return
        has_ended = view.poll is not None and view.poll.state in ("done", "failed")
        if has_ended and time.monotonic() - process.answered_at < IDLE_S:
            return
        seen = process.seen if number == self.teller else sys.maxsize
        process.poll = process.actor.poll.remote(seen, BEAT_S if process.is_spare else ANSWER_S)

    def _take_poll(self, number: int, reference: Any, now: float) -> None:
        import ray

        process = self._all[number]
        process.poll = None
        try:
            poll: RankPoll = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            process.dies(death_line(error))
            return
        if number == self.teller:
            self._events += poll.events
            process.seen += len(poll.events)
        result = poll.result
        if poll.state == "done":
            process.result = result
        pause = None
        if isinstance(result, FitOutcome):
            pause = Pause(stopped=result.stopped, handed_over=result.handed_over)
        process.answered_at = now
        process.view = replace(
            process.view,
            poll=replace(poll, events=(), result=None),
            pause=pause,
            silent_s=0.0,
            stopped_s=0.0,
            is_awake=not poll.starts,
        )

    def _take_reply(self, reference: Any, number: int, call: int, verb: Verb) -> None:
        import ray

        process = self._all[number]
        try:
            value = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            process.dies(death_line(error))
            return
        except ray.exceptions.RayTaskError as error:
            reply = Reply(process=number, call=call, verb=verb, **told(error))
        else:
            plain = value if isinstance(value, RankAddress | int) else None
            if isinstance(plain, RankAddress):
                process.address = plain
            reply = Reply(process=number, call=call, verb=verb, value=plain)
        process.begins = process.begins and verb != "begin"
        process.view = replace(process.view, silent_s=0.0, stopped_s=0.0)
        self._replies.append(reply)


def _end_born(born: Future[Any]) -> None:
    """End a process that was not wanted any more when it was born."""
    with suppress(Exception):
        end_process(born.result(), None)
