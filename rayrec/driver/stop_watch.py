"""`StopWatch`: tells whether a silent process is stopped, wherever it is in its start.

A process that Ray still makes, or that imports torch on a busy machine, may give no answer for
long. So its silence alone says nothing, and the kernel of its machine is asked. Ray's head knows
the number of the process before the actor's constructor runs. A process of this machine is looked
at directly; one of another machine by a small task there, in a process that Ray mostly has idle.
Where the head or the node gives no answer, nothing is known of a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rayrec.driver.head import head, worker_of
from rayrec.machine.workers import is_stopped
from rayrec.train.seat import RankAddress

# silence after which a process is looked at; a task on its node costs more than a look from here
HERE_AFTER_S = 1.0
ELSEWHERE_AFTER_S = 5.0
# between two questions about one process
AGAIN_S = 1.0


class StopWatch:
    """Looks at one process, from when it falls silent until it answers."""

    def __init__(self) -> None:
        self._question: Future[Any] | None = None
        self._asked_at = 0.0
        # a look at the process on its node, and the newest answer
        self._look: Any = None
        self._stopped = False

    def address(self, actor: Any) -> RankAddress | None:
        """Return the address of a process that has not told it, once the head has."""
        key = actor._actor_id.hex()
        found: RankAddress | None = self._ask(lambda: worker_of(key))
        return found

    def is_stopped(self, address: RankAddress, silent_s: float) -> bool:
        """Return True if a process that has been silent for so long is known to be stopped."""
        import ray

        if address.host == ray.util.get_node_ip_address():
            self._stopped = is_stopped(address.pid)
        elif silent_s >= ELSEWHERE_AFTER_S:
            self._look_elsewhere(address)
        return self._stopped

    def _look_elsewhere(self, address: RankAddress) -> None:
        """Have a task on its node look at the process."""
        import ray

        if self._look is None:
            # the head keeps the task's function, so that the call may wait for it
            self._look = self._ask(lambda: _task(address))
        if self._look is not None and ray.wait([self._look], timeout=0)[0]:
            look, self._look = self._look, None
            try:
                self._stopped = ray.get(look)
            except ray.exceptions.RayError:  # the node is gone, or has no room for the task
                self._stopped = False

    def _ask(self, what: Callable[[], Any]) -> Any:
        """Ask the head; return its answer, or None while there is none or where it was lost."""
        now = time.monotonic()
        if self._question is None and now - self._asked_at >= AGAIN_S:
            self._question, self._asked_at = head.aside(what), now
        question = self._question
        if question is None or not question.done():
            return None
        self._question = None
        return None if question.exception() is not None else question.result()


def _task(address: RankAddress) -> Any:
    """Return the reference of a look at a process by a task on its node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(address.node_id, soft=False)
    look = ray.remote(is_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    return look.remote(address.pid)
