"""Nodes that will go, and what a run does about them before they are gone.

Ray marks a node as draining when its cloud takes it back, when `ray start --block` gets SIGTERM, or
when somebody says `ray drain-node`, often with a deadline. A run whose number of ranks may change
leaves the node: at once where all of its ranks have a place elsewhere, else when the deadline comes
near. Any other run saves. To leave a node, ranks pause as for a change of their number: they save
and end their task, get places on nodes that stay, and the run goes on from there. None of this is a
failure.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Literal, NamedTuple

from rayrec.driver.commands import Command, Save, Tell
from rayrec.driver.filling import ask, there
from rayrec.driver.run import Run
from rayrec.driver.scaling import SHRINK_AFTER_S, ScalingConfig
from rayrec.driver.views import Observation, View
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
        ends: deadline of each draining node, from `head.draining`.
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
    scaling: ScalingConfig,
    *,
    keeps: bool,
    ranks: int,
    elsewhere: int,
    waited_s: float,
) -> Answer:
    """Decide what a run does about a draining node.

    Args:
        scaling: the numbers of ranks that the run may have, and its longest wait for places
            elsewhere, where the node has no deadline.
        keeps: the run can save.
        ranks: number of ranks that the run has.
        elsewhere: places for ranks on nodes that stay, also those that ranks hold.
        waited_s: seconds since the notice.
    Returns:
        "leave" if the ranks leave now, "move" if they save now and leave later, "save" if they
        save and stay, "none" if nothing can be done.
    """
    if not keeps:
        return "none"
    # a run on the driver's node alone has nowhere to go
    if not scaling.is_elastic or not going.ranks:
        return "save"
    if elsewhere < scaling.least:
        return "move"
    patience_s = scaling.shrink_after_s or SHRINK_AFTER_S
    hurry = waited_s >= patience_s if going.left_s is None else going.left_s <= LEAVE_S
    return "leave" if hurry or elsewhere >= ranks else "move"


def notice(
    run: Run, view: View, ranks: Sequence[Observation]
) -> Generator[Command, None, tuple[str, ...]]:
    """Answer nodes that will go; return the hosts that the ranks leave now."""
    running = all(rank.poll is not None and rank.poll.state == "running" for rank in ranks)
    if not running or view.rooms is None or not view.rooms.draining:
        return ()
    nodes = going(view.rooms.draining, run.roster.addresses, run.rules.here, view.wall)
    if not nodes:
        return ()
    scaling, account = run.rules.scaling, run.preemption
    elsewhere = 0
    if scaling.is_elastic:
        # an autoscaler sees what is asked for, and brings another node meanwhile
        yield from ask(run, view, run.sizing.wanted)
        elsewhere = len(there(run, view))
    save = leave = False
    for node in nodes:
        answer = answer_to(
            node,
            scaling,
            keeps=run.rules.keeps,
            ranks=min(len(ranks), run.sizing.wanted),
            elsewhere=elsewhere,
            waited_s=view.now - account.since.setdefault(node.node, view.now),
        )
        leave = leave or answer == "leave"
        saves = answer in ("move", "save")
        if (node.node, answer) not in account.told:
            account.told.add((node.node, answer))
            yield Tell(event=node.noticed(run.progress.step, answer))
            save = save or saves
        if not node.is_last_call:
            # its deadline may have been put off
            account.last.discard(node.node)
        elif node.node not in account.last:
            # steps since the first save would be lost
            account.last.add(node.node)
            save = save or saves
    first = run.roster.ranks[0].process
    if save and first is not None:
        yield Save(process=first)
    return tuple(sorted({node.host for node in nodes if node.ranks})) if leave else ()
