"""`Preemption`: what a run did so far about nodes that will go; the rule is `preemption_policy`.

To leave a node, ranks pause as for a change of their number: they save and end their task, get
places on nodes that stay, and the run goes on from there. None of this is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rayrec.driver.preemption_policy import Answer, Going, answer_to
from rayrec.driver.scaling import SHRINK_AFTER_S, ScalingConfig
from rayrec.train.events import Noticed


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


@dataclass(kw_only=True, slots=True)
class Preemption:
    """Answers of one run to nodes that will go.

    Attributes:
        since: when the notice of each node came.
        told: answers that were told of each node.
        last: nodes before whose end the last save was asked for.
        left: hosts that the ranks are leaving.
    """

    since: dict[str, float] = field(default_factory=dict)
    told: dict[str, set[Answer]] = field(default_factory=dict)
    last: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    def answer(
        self,
        nodes: Sequence[Going],
        scaling: ScalingConfig,
        ranks: int,
        elsewhere: int,
        step: int,
        now: float,
        *,
        keeps: bool,
    ) -> Wish:
        """Return the response of the ranks to nodes that are being drained.

        Args:
            ranks: number of ranks. elsewhere: places on nodes that stay.
            step: global steps done. now: seconds of a steady clock.
            keeps: the run keeps checkpoints.
        """
        save = False
        told: list[Noticed] = []
        answers: dict[str, Answer] = {}
        patience_s = scaling.shrink_after_s
        for node in nodes:
            answer = answer_to(
                node,
                keeps=keeps,
                elastic=scaling.is_elastic,
                least=scaling.least,
                ranks=ranks,
                elsewhere=elsewhere,
                waited_s=now - self.since.setdefault(node.node, now),
                patience_s=SHRINK_AFTER_S if patience_s is None else patience_s,
            )
            answers[node.node] = answer
            saves = answer in ("move", "save")
            if answer not in self.told.setdefault(node.node, set()):
                self.told[node.node].add(answer)
                told.append(node.noticed(step, answer))
                save = save or saves
            if node.is_last_call and node.node not in self.last:
                # steps since the first save would be lost
                self.last.add(node.node)
                save = save or saves
        leave = "leave" in answers.values()
        if leave:
            self.left = sorted({node.host for node in nodes if node.ranks})
        return Wish(tuple(told), save, leave)

    def began(self, step: int, *, lost: bool) -> str:
        """Record that all ranks train again; return a line about the nodes that they left, or "".

        Args:
            lost: the ranks begin again after a failure.
        """
        left, self.left = self.left, []
        if lost or not left:
            return ""
        return f"left {', '.join(left)} at step {step}; all ranks go on elsewhere"
