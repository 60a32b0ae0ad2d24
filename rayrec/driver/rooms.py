"""`PlacementGroups`: the room of a run on a Ray cluster, asked for and given back aside.

Every call is made by `head`, in the order in which it was asked for, so that no run stands still
while the cluster's head does not answer. A group whose call was lost is asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rayrec.driver.commands import Ask
from rayrec.driver.head import alive_nodes, bundles, draining, head, resources
from rayrec.driver.roster import BASE, Place
from rayrec.driver.views import Rooms

WAIT_TURN_S = 0.25


class PlacementGroups:
    """Placement groups of one run, by number.

    Args:
        bundle: Ray resources of each place.
    """

    def __init__(self, bundle: dict[str, float]) -> None:
        self._bundle = bundle
        # both belong to the thread of `head`
        self._asked: dict[int, Ask] = {}
        self._groups: dict[int, Any] = {}

    def ask(self, ask: Ask) -> None:
        """Ask for a group."""

        def make() -> None:
            self._asked[ask.group] = ask
            self._make(ask)

        head.aside(make)

    def give_back(self, number: int) -> None:
        """Give a group back."""
        head.aside(partial(self._remove, number))

    def group(self, number: int) -> Any:
        """Return the placement group of a number, which the cluster has given."""
        return self._groups[number]

    def rooms(self, before: Rooms | None) -> Rooms | None:
        """Return what the head told last of nodes and places, and ask it again; does not wait."""
        found: Rooms | None = head.recent((self, "rooms"), self._look, before)
        return found

    def resources(self) -> Any:
        """Return what the head told last of resources, and ask it again; does not wait."""
        return head.recent((self, "resources"), resources)

    def close(self) -> None:
        """Give all groups back, and wait until that is done unless the head is silent."""

        def remove() -> None:
            for number in list(self._asked):
                self._remove(number)

        head.aside(remove)
        head.settle()

    def _make(self, ask: Ask) -> None:
        from ray.util.placement_group import placement_group

        # Ray takes the wish for a node with one strategy alone; for one bundle all are alike
        near = {"_soft_target_node_id": ask.near} if ask.near else {}
        wanted = [dict(self._bundle) for _ in range(ask.bundles)]
        self._groups[ask.group] = placement_group(wanted, strategy=ask.strategy, **near)

    def _remove(self, number: int) -> None:
        from ray.util.placement_group import remove_placement_group

        self._asked.pop(number, None)
        group = self._groups.pop(number, None)
        if group is not None:
            remove_placement_group(group)

    def _look(self) -> Rooms:
        asked_at = time.monotonic()
        alive = alive_nodes()
        nodes: dict[Place, str] = {}
        base = "unknown"
        for number, ask in self._asked.items():
            if number not in self._groups:
                self._make(ask)
            state, given = bundles(self._groups[number])
            if number == BASE:
                base = state
            there = {bundle: node for bundle, node in given.items() if node in alive}
            nodes |= {Place(number, bundle): node for bundle, node in there.items()}
        return Rooms(asked_at=asked_at, alive=alive, draining=draining(), nodes=nodes, base=base)


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
