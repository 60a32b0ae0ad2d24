"""`PlacementGroups`: the room of a run on a Ray cluster, asked for and given back aside.

Every call is made by `head`, in the order in which it was asked for, so that no run stands still
while the cluster's head does not answer. A call whose answer is lost is made again. Since the head
may have carried it out all the same, each group has a name, by which it is looked for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rayrec.driver.commands import Ask
from rayrec.driver.head import alive_nodes, bundles, draining, head, lost_calls, resources
from rayrec.driver.roster import BASE, Place
from rayrec.driver.views import Resources, Rooms

WAIT_TURN_S = 0.25
# A group that is removed while Ray is placing it takes its room along for as long as the cluster is
# up (Ray 2.60: 5 of 3,000 that were removed at once). Placing takes some milliseconds.
PLACING, PLACED_S = ("QUEUED", "SCHEDULING_STARTED"), 1.0


class PlacementGroups:
    """Placement groups of one run, by number.

    Args:
        bundle: Ray resources of each place.
    """

    def __init__(self, bundle: dict[str, float]) -> None:
        self._bundle = bundle
        self._name = f"rayrec-{uuid.uuid4().hex}"
        # these belong to the thread of `head`
        self._asked: dict[int, Ask] = {}
        self._groups: dict[int, Any] = {}
        self._unwanted: set[int] = set()

    def ask(self, ask: Ask) -> None:
        """Ask for a group."""

        def make() -> None:
            self._asked[ask.group] = ask
            self._groups[ask.group] = self._make(ask)

        head.aside(make)

    def give_back(self, number: int) -> None:
        """Give a group back."""
        head.aside(partial(self._remove, number))

    def group(self, number: int) -> Any:
        """Return the placement group of a number, which the cluster has given."""
        return self._groups[number]

    def rooms(self) -> Rooms | None:
        """Ask the head of nodes and places, and return its answer if it has come; does not wait."""
        return head.news((self, "rooms"), self._look)

    def resources(self) -> Resources | None:
        """Ask the head of resources, and return its answer if it has come; does not wait."""
        return head.news((self, "resources"), resources)

    def close(self) -> None:
        """Give all groups back, and wait until that is done unless the head is silent."""

        def remove() -> None:
            for number in {*self._asked, *self._unwanted}:
                with suppress(*lost_calls()):
                    self._remove(number)

        # the second round is for calls that the first one lost
        for _ in range(2):
            head.aside(remove)
        head.settle()

    def _make(self, ask: Ask) -> Any:
        from ray.util.placement_group import placement_group

        # Ray takes the wish for a node with one strategy alone; for one bundle all are alike
        near = {"_soft_target_node_id": ask.near} if ask.near else {}
        wanted = [dict(self._bundle) for _ in range(ask.bundles)]
        name = self._name_of(ask.group)
        return placement_group(wanted, ask.strategy, name, **near)

    def _made_again(self, ask: Ask) -> bool:
        """Find or make a group whose call was lost; return False if that call came between."""
        from ray.exceptions import RaySystemError

        try:
            self._groups[ask.group] = self._found(ask.group) or self._make(ask)
        except RaySystemError:  # its name is taken
            return False
        return True

    def _remove(self, number: int) -> None:
        self._unwanted.add(number)
        self._asked.pop(number, None)
        group = self._groups.get(number) or self._found(number)
        if group is not None:
            remove_group(group)
        self._groups.pop(number, None)
        self._unwanted.discard(number)

    def _found(self, number: int) -> Any:
        """Return the group that was made by a call whose answer was lost, or None."""
        from ray.util.placement_group import get_placement_group

        with suppress(ValueError):
            return get_placement_group(self._name_of(number))
        return None

    def _name_of(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _look(self) -> Rooms:
        asked_at = time.monotonic()
        alive = alive_nodes()
        nodes: dict[Place, str] = {}
        base = "unknown"
        for number in tuple(self._unwanted):
            self._remove(number)
        for number, ask in self._asked.items():
            if number not in self._groups and not self._made_again(ask):
                continue
            state, given = bundles(self._groups[number])
            if number == BASE:
                base = state
            there = {bundle: node for bundle, node in given.items() if node in alive}
            nodes |= {Place(number, bundle): node for bundle, node in there.items()}
        return Rooms(asked_at=asked_at, alive=alive, draining=draining(), nodes=nodes, base=base)


def remove_group(group: Any) -> None:
    """Give a placement group back, once Ray is not placing it, or after a second."""
    from ray.util.placement_group import remove_placement_group

    deadline = time.monotonic() + PLACED_S
    while bundles(group)[0] in PLACING and time.monotonic() < deadline:
        time.sleep(0.002)
    remove_placement_group(group)


def comes_in_time(group: Any, timeout_s: float, check: Callable[[], None]) -> bool:
    """Wait for a placement group in short turns; return True once it is placed.

    Args:
        check: called several times a second; its error ends the wait.
    """
    from ray.util.placement_group import placement_group_table

    deadline = time.monotonic() + timeout_s
    while True:
        check()
        if head.answer(lambda: placement_group_table(group), check).get("state") == "CREATED":
            return True
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(WAIT_TURN_S, left_s))
