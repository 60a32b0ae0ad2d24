"""Nodes that will go, and what a run does about them before they are gone.

Ray marks a node as draining when its cloud takes it back, when `ray start --block` gets SIGTERM, or
when somebody says `ray drain-node`, often with a deadline. A run whose number of ranks may change
leaves the node: at once where all of its ranks have a place elsewhere, else when the deadline comes
near. Any other run saves. All of it is pure, with every time handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rayrec.train.events import Noticed
from rayrec.train.seat import RankAddress

# a window, a save and the start of other ranks take some of it
LEAVE_S = 60.0
# time for one more window and a save
LAST_S = 20.0

Answer = Literal["leave", "move", "save", "none"]


class Going(NamedTuple):
    """A node that will go.

    Attributes:
        node: its id.
        host: its address, or "" where no rank is on it.
        ranks: those on it; without any, the driver itself is.
        left_s: seconds until it goes; None where nobody says when.
    """

    node: str
    host: str
    ranks: tuple[int, ...]
    left_s: float | None

    @property
    def is_last_call(self) -> bool:
        """True if the node's deadline is so near that the last save is due."""
        return self.left_s is not None and self.left_s <= LAST_S

    def noticed(self, step: int, answer: Answer) -> Noticed:
        """Return the event that reports the node and the run's answer."""
        return Noticed(
            step=step, host=self.host, ranks=self.ranks, seconds=self.left_s, answer=answer
        )


def going(
    ends: Mapping[str, float | None], addresses: Sequence[RankAddress], here: str, now: float
) -> tuple[Going, ...]:
    """Return the draining nodes that hold ranks of a run or its driver.

    Args:
        ends: deadline of each draining node, from `facts.draining`.
        addresses: addresses of the run's ranks.
        here: the driver's node.
        now: wall clock seconds.
    """
    matter = []
    for node, at in sorted(ends.items()):
        ranks = tuple(rank for rank, each in enumerate(addresses) if each.node_id == node)
        host = next((each.host for each in addresses if each.node_id == node), "")
        if ranks or node == here:
            left_s = None if at is None else max(0.0, at - now)
            matter.append(Going(node, host, ranks, left_s))
    return tuple(matter)


def answer_to(
    going: Going,
    *,
    keeps: bool,
    elastic: bool,
    least: int,
    ranks: int,
    elsewhere: int,
    waited_s: float,
    patience_s: float,
) -> Answer:
    """Decide what a run does about a draining node.

    Args:
        keeps: the run can save.
        elastic: its number of ranks may change, down to `least`.
        ranks: number of ranks that the run has.
        elsewhere: places for ranks on nodes that stay, also those that ranks hold.
        waited_s: seconds since the notice.
        patience_s: longest wait for places elsewhere, where the node has no deadline.
    Returns:
        "leave" if the ranks leave now, "move" if they save now and leave later, "save" if they
        save and stay, "none" if nothing can be done.
    """
    if not keeps:
        return "none"
    # a run on the driver's node alone has nowhere to go
    if not elastic or not going.ranks:
        return "save"
    if elsewhere < least:
        return "move"
    hurry = waited_s >= patience_s if going.left_s is None else going.left_s <= LEAVE_S
    return "leave" if hurry or elsewhere >= ranks else "move"
