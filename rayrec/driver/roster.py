"""The roster of a run: one list of seats, each with a role, a stage, a place and a process.

A rank trains; a spare waits to take the place of a lost rank; a newcomer starts beside the ranks
and becomes one at their next pause; a leaver has lost its rank and still has tables to hand over.
Recovery, growth, shrinkage, drained nodes and spares all change the seats of this one list. No Ray
and no clock: places and processes are numbers, which `ray_cluster` knows by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

from rayrec.train.seat import RankAddress

BASE = 0  # the placement group of the smallest number of ranks


class Place(NamedTuple):
    """Place for one process: a bundle of a placement group."""

    group: int
    bundle: int


class Role(Enum):
    """Role of a seat."""

    RANK = "rank"
    SPARE = "spare"
    NEWCOMER = "newcomer"
    LEAVER = "leaver"


class Stage(Enum):
    """Stage of a seat."""

    ASKED = "its place is asked for"
    PLACED = "it has a place and no process"
    STARTING = "its process comes up"
    WARMING = "its process imports what a task needs"
    READY = "its process waits"
    WORKING = "its process does a task"


@dataclass(kw_only=True, slots=True, eq=False)
class Seat:
    """One seat.

    Attributes:
        place: place on the cluster, given or asked for.
        process: number of the process; None where there is none.
        address: address of the process, once it has told it.
        node: last known node of the place, or "".
        near: node that a spare is wanted on.
        deaths, not_before: deaths of a spare since it was last ready, and the earliest time of its
            next start.
    """

    role: Role
    place: Place
    stage: Stage = Stage.ASKED
    process: int | None = None
    address: RankAddress | None = None
    node: str = ""
    near: str = ""
    deaths: int = 0
    not_before: float = 0.0

    @property
    def is_up(self) -> bool:
        """True if the seat has a process that has told its address."""
        return self.process is not None and self.address is not None

    @property
    def host(self) -> str:
        """Host of its process, or "" before that has told its address."""
        return self.address.host if self.address else ""

    def take(self, other: Seat) -> None:
        """Take place and process of another seat, which gets the place of this one."""
        self.place, other.place = other.place, self.place
        self.node, other.node = other.node, self.node
        self.process, self.address, self.stage = other.process, other.address, other.stage
        other.process = other.address = None
        other.stage, other.not_before = Stage.PLACED, 0.0


@dataclass(kw_only=True, slots=True)
class Roster:
    """All seats of one run.

    Attributes:
        seats: the seats; those of the ranks are in the order of the ranks.
        groups: placement groups that are held or asked for.
        processes: numbers for processes.
    """

    seats: list[Seat] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    processes: Iterator[int] = field(default_factory=partial(count, 1))
    _new_groups: Iterator[int] = field(default_factory=count)

    def of(self, *roles: Role) -> list[Seat]:
        """Return the seats of some roles, in order."""
        return [seat for role in roles for seat in self.seats if seat.role is role]

    @property
    def ranks(self) -> list[Seat]:
        """Seats of the ranks, by rank."""
        return self.of(Role.RANK)

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """Addresses of the ranks that have one."""
        return tuple(seat.address for seat in self.ranks if seat.address is not None)

    def at(self, process: int) -> Seat | None:
        """Return the seat of a process."""
        return next((seat for seat in self.seats if seat.process == process), None)

    def new_group(self) -> int:
        """Return the number of a new placement group."""
        self.groups.append(next(self._new_groups))
        return self.groups[-1]

    def remove(self, seat: Seat) -> None:
        """Remove a seat."""
        self.seats = [other for other in self.seats if other is not seat]

    def reseat(self, places: Sequence[Place], *, keep: bool) -> tuple[list[int], list[int]]:
        """Assign one rank to each of `places`; ranks at other places lose their rank.

        Ranks whose place stays keep their process and their order. A newcomer at one of the places
        becomes its rank, and so does a leaver.

        Args:
            keep: ranks that lose their rank become leavers; else their processes are not needed.
        Returns:
            the old indices of the removed ranks, and the processes that nobody needs.
        """
        before = self.ranks
        gone = [rank for rank, seat in enumerate(before) if seat.place not in places]
        unused = []
        for rank in gone:
            seat = before[rank]
            if keep and seat.is_up:
                seat.role = Role.LEAVER
            else:
                self.remove(seat)
                unused.append(seat.process)
        held = {seat.place for seat in self.ranks}
        there = {seat.place: seat for seat in self.of(Role.NEWCOMER, Role.LEAVER)}
        for place in [place for place in places if place not in held]:
            seat = there.get(place) or Seat(role=Role.RANK, place=place, stage=Stage.PLACED)
            self.remove(seat)
            seat.role = Role.RANK
            self.seats.append(seat)
        for seat in self.of(Role.NEWCOMER):
            self.remove(seat)
            unused.append(seat.process)
        return gone, [process for process in unused if process is not None]

    def sort(self, here: str) -> None:
        """Make the ranks of each node neighbours, those of the node `here` first."""
        ranks = self.ranks
        others = [seat for seat in self.seats if seat.role is not Role.RANK]
        order = neighbours([seat.address for seat in ranks if seat.address is not None], here)
        self.seats = [ranks[i] for i in order] + others

    @property
    def are_neighbours(self) -> bool:
        """True if the ranks of each node are consecutive."""
        nodes = [address.node_id for address in self.addresses]
        return sum(one != other for one, other in pairwise(nodes)) + 1 == len(set(nodes))


def neighbours(addresses: Sequence[RankAddress], here: str) -> list[int]:
    """Order of the processes by node: those of the node `here` first, then by address and node."""

    def key(i: int) -> tuple[bool, str, str, int]:
        address = addresses[i]
        return address.node_id != here, address.host, address.node_id, i

    return sorted(range(len(addresses)), key=key)


def choose(there: Sequence[Place], taken: Sequence[Place], ranks: int) -> list[Place]:
    """Choose places for `ranks` ranks: first those that ranks hold, in the order of the ranks.

    Args:
        there: all places; those that can only be given back together come first.
        taken: places of all ranks in order, also of lost ones.
    """
    held = [place for place in taken if place in there]
    order = sorted(held, key=there.index)[:ranks]
    kept = [place for place in held if place in order]
    return kept + [place for place in there if place not in held][: ranks - len(kept)]


def surplus(
    singles: Sequence[int],
    taken: Collection[Place],
    draining: Collection[int],
    wanted: int,
    most_more: int,
) -> tuple[list[int], int]:
    """Return the single groups to give back, and how many more are to be asked for.

    Args:
        singles: placement groups of one place each, beside that of the smallest number of ranks.
        taken: places that ranks hold, which are given back last.
        draining: groups with places on nodes that will go.
        wanted: number of single groups that the run wants. most_more: bound on those that no rank
            holds.
    """
    back = [group for group in singles if group in draining and Place(group, 0) not in taken]
    left = [group for group in singles if group not in back]
    left.sort(key=lambda group: Place(group, 0) not in taken)
    held = sum(Place(group, 0) in taken for group in left)
    # if the base has lost a place, more ranks than these hold a single one
    keep = min(max(wanted, held), held + most_more)
    return back + left[keep:], max(0, keep - len(left))


def numbered(seats: Sequence[Seat]) -> Iterator[tuple[int, Seat]]:
    """Yield the seats that have a process, with its number."""
    for seat in seats:
        if seat.process is not None:
            yield seat.process, seat
