"""`PreemptionWatch`: has the ranks of a run leave nodes that will go, or save before they are gone.

It asks Ray about once a second, and the rule of `preemption_policy` what to do. To leave, ranks
pause as for a change of their number: they save and end their task, `Assignment` gives them places
on nodes that stay, and the run goes on from there. None of this is a failure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from rayrec.driver.blame import Observation
from rayrec.driver.facts import draining
from rayrec.driver.head import head
from rayrec.driver.preemption_policy import Answer, Going, answer_to, going
from rayrec.driver.run_placement import RunPlacement
from rayrec.driver.scaling import SHRINK_AFTER_S, ScalingConfig
from rayrec.driver.sizing import Sizing
from rayrec.driver.worker_group import WorkerGroup
from rayrec.train.events import Noticed

LOOK_S = 1.0


class Wish(NamedTuple):
    """Response of a run to draining nodes.

    Attributes:
        told: events to report to the user.
        save: the ranks save at the end of their window and go on.
        leave: the ranks save and pause, to go on elsewhere.
    """

    told: tuple[Noticed, ...] = ()
    save: bool = False
    leave: bool = False


class PreemptionWatch:
    """Watches the nodes of one run.

    Args:
        placement: places of the cluster.
        workers: actors of the ranks.
        sizing: decides the number of ranks.
        keeps: the run keeps checkpoints.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        placement: RunPlacement,
        workers: WorkerGroup,
        sizing: Sizing,
        keeps: bool,
    ) -> None:
        self._scaling, self._placement, self._workers = scaling, placement, workers
        self._sizing, self._keeps = sizing, keeps
        self._looked_at = 0.0
        # by node: when its notice came, the answers that were told, and whether the last save
        # before it goes was asked for
        self._since: dict[str, float] = {}
        self._told: dict[str, set[Answer]] = {}
        self._last: set[str] = set()
        self._left: list[str] = []

    def look(self, ranks: Sequence[Observation], step: int, now: float) -> Wish:
        """Return the response of the ranks to nodes that are being drained.

        Args:
            step: global steps done.
            now: seconds of a steady clock.
        """
        running = all(rank.poll is not None and rank.poll.state == "running" for rank in ranks)
        busy = self._sizing.paused_since is not None or not running
        if busy or now - self._looked_at < LOOK_S:
            return Wish()
        self._looked_at = now
        import ray

        here = ray.get_runtime_context().get_node_id()
        ends = head.recent("nodes that will go", draining, {})
        nodes = going(ends, self._workers.addresses, here, time.time())
        if not nodes:
            return Wish()
        return self._wish(nodes, step, now)

    def _wish(self, nodes: Sequence[Going], step: int, now: float) -> Wish:
        """Return the response to the given draining nodes, and ask the cluster for other places."""
        size, elsewhere = len(self._workers.places), 0
        if self._scaling.is_elastic:
            # an autoscaler sees what is asked for, and brings another node meanwhile
            gone = sum(len(node.ranks) for node in nodes)
            self._placement.ask(self._sizing.wanted + gone, self._workers.places)
            elsewhere = len(self._placement.seen())
        save = False
        told: list[Noticed] = []
        answers: dict[str, Answer] = {}
        for node in nodes:
            waited_s = now - self._since.setdefault(node.node, now)
            patience_s = self._scaling.shrink_after_s
            answer = answer_to(
                node,
                keeps=self._keeps,
                elastic=self._scaling.is_elastic,
                least=self._scaling.least,
                ranks=min(size, self._sizing.wanted),
                elsewhere=elsewhere,
                waited_s=waited_s,
                patience_s=SHRINK_AFTER_S if patience_s is None else patience_s,
            )
            answers[node.node] = answer
            if answer not in self._told.setdefault(node.node, set()):
                self._told[node.node].add(answer)
                told.append(node.noticed(step, answer))
                save = save or answer in ("move", "save")
            if node.is_last_call and node.node not in self._last:
                # steps since the first save would be lost
                self._last.add(node.node)
                save = save or answer in ("move", "save")
        leave = "leave" in answers.values()
        if leave:
            self._left = sorted({node.host for node in nodes if node.ranks})
        return Wish(tuple(told), save, leave)

    def began(self, step: int, *, lost: bool) -> str:
        """Record that all ranks train again; return a line about the nodes that they left, or "".

        Args:
            lost: the ranks begin again after a failure.
        """
        left, self._left = self._left, []
        if lost or not left:
            return ""
        return f"left {', '.join(left)} at step {step}; all ranks go on elsewhere"
