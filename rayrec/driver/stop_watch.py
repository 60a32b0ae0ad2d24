"""`StopWatch`: tells the stopped among silent processes, wherever they are in their start.

A process that Ray still makes, or that imports torch on a busy machine, may give no answer for
long. So its silence alone says nothing, and the kernel of its machine is asked. Ray's head knows
the number of the process before the actor's constructor runs. A process of this machine is looked
at directly; one of another machine by a small task there, in a process that Ray mostly has idle.
Where the head or the node gives no answer, nothing is known of a process.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rayrec.driver.head import head, worker_of
from rayrec.machine.workers import is_stopped
from rayrec.train.seat import RankAddress

# silence after which a process is looked at; a task on its node costs more than a look from here
HERE_AFTER_S = 1.0
ELSEWHERE_AFTER_S = 5.0
# between two questions about one process
AGAIN_S = 1.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Suspect:
    """A silent process.

    Attributes:
        actor: Ray's handle. address: its address, once it is known.
        question: what the head was asked. task: the look at it on its node.
        asked_at: time of the last question. stopped: the newest answer.
    """

    actor: Any
    address: RankAddress | None = None
    question: Future[Any] | None = None
    task: Any = None
    asked_at: float = 0.0
    stopped: bool = False


class StopWatch:
    """Looks at the silent processes of one run."""

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspect] = {}

    def address(self, number: int) -> RankAddress | None:
        """Return the address of a process that was looked at."""
        suspect = self._suspects.get(number)
        return None if suspect is None else suspect.address

    def forget(self, number: int) -> None:
        """Forget what is known of a process."""
        self._suspects.pop(number, None)

    def is_stopped(
        self, number: int, actor: Any, address: RankAddress | None, silent_s: float
    ) -> bool:
        """Return True if a process that has been silent for so long is known to be stopped."""
        import ray

        if actor is None or silent_s < HERE_AFTER_S:
            # what was seen before its last answer is void
            self.forget(number)
            return False
        suspect = self._suspects.setdefault(number, _Suspect(actor=actor))
        suspect.address = suspect.address or address
        if suspect.address is None:
            self._find(suspect)
        elif suspect.address.host == ray.util.get_node_ip_address():
            suspect.stopped = is_stopped(suspect.address.pid)
        elif silent_s >= ELSEWHERE_AFTER_S:
            self._look_elsewhere(suspect, suspect.address)
        return suspect.stopped

    def _find(self, suspect: _Suspect) -> None:
        """Ask the head for the address of a process."""
        key = suspect.actor._actor_id.hex()
        if suspect.question is None and _due(suspect):
            suspect.question = head.aside(lambda: worker_of(key))
        suspect.address = _answer(suspect)

    def _look_elsewhere(self, suspect: _Suspect, address: RankAddress) -> None:
        """Have a task on its node look at a process."""
        import ray

        if suspect.task is None:
            if suspect.question is None and _due(suspect):
                # the head keeps the task's function, so that the call may wait for it
                suspect.question = head.aside(lambda: _task(address))
            suspect.task = _answer(suspect)
        if suspect.task is not None and ray.wait([suspect.task], timeout=0)[0]:
            task, suspect.task = suspect.task, None
            try:
                suspect.stopped = ray.get(task)
            except ray.exceptions.RayError:  # the node is gone, or has no room for the task
                suspect.stopped = False


def _due(suspect: _Suspect) -> bool:
    now = time.monotonic()
    due = now - suspect.asked_at >= AGAIN_S
    suspect.asked_at = now if due else suspect.asked_at
    return due


def _answer(suspect: _Suspect) -> Any:
    """Return the head's answer; None while there is none, or where the call was lost."""
    question = suspect.question
    if question is None or not question.done():
        return None
    suspect.question = None
    return None if question.exception() is not None else question.result()


def _task(address: RankAddress) -> Any:
    """Return the reference of a look at a process by a task on its node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(address.node_id, soft=False)
    look = ray.remote(is_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    return look.remote(address.pid)
