"""An option is a way to lay out the tables of one item, with its prices; an item has several.

Tables that must stay together are one `Item`. What another option beats wherever it goes is left
out. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rayrec.layout.geometry import Layout, Replicated
from rayrec.layout.plan import Storage
from rayrec.planner.candidates import Candidate

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Option:
    """A way to lay out the tables of one item, with its prices.

    A locality is a distinct number of ranks per host; a position is one of the ranks it takes.

    Attributes:
        candidates: one per table, alike in kind, number of ranks and sites.
        storages: storages of their rows, one per table.
        seconds: seconds[locality][position].
        num_bytes: owner's bytes by position.
        home_bytes, home_s: its cost for every rank of the world, as home.
        world_size: ranks of the world.
        num_ranks: positions.
        work_s: sum of the seconds of all positions, in the locality where it is least.
        peak_s: the largest piece, in the locality where it is slowest.
        mean_s: seconds that it adds to the mean rank, home included.
        most_bytes: bytes that the rank with the largest piece must have free.
    """

    candidates: tuple[Candidate, ...]
    storages: tuple[Storage, ...]
    seconds: dict[int, tuple[float, ...]]
    num_bytes: tuple[int, ...]
    home_bytes: int
    home_s: float
    world_size: int
    num_ranks: int = field(init=False)
    work_s: float = field(init=False)
    peak_s: float = field(init=False)
    mean_s: float = field(init=False)
    most_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        # `seconds` holds one entry per number of ranks that a host may have. Which host it will be
        # is not known yet, so the mean rank takes the best case, and the largest piece the worst.
        work_s = min(sum(values) for values in self.seconds.values())
        object.__setattr__(self, "num_ranks", len(self.num_bytes))
        object.__setattr__(self, "work_s", work_s)
        object.__setattr__(self, "peak_s", max(max(values) for values in self.seconds.values()))
        object.__setattr__(self, "mean_s", work_s / self.world_size + self.home_s)
        object.__setattr__(self, "most_bytes", max(self.num_bytes) + self.home_bytes)

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks; the option takes `num_ranks` of one of them."""
        return self.candidates[0].sites

    @property
    def kind(self) -> str:
        """The kind it was made for."""
        return self.candidates[0].kind

    @property
    def replicated(self) -> bool:
        """True if every rank holds a copy."""
        return isinstance(self.candidates[0].template, Replicated)

    @property
    def family(self) -> tuple[bool, bool, bool]:
        """Kind of its layouts, wherever they lie."""
        return self.candidates[0].family

    def layouts(self, ranks: Sequence[int]) -> tuple[Layout, ...]:
        """The layout of every table of the item, on `ranks`, which ascend."""
        return tuple(candidate.place(ranks) for candidate in self.candidates)


@dataclass(frozen=True, slots=True)
class Item:
    """Tables that are placed as one, and the ways to do it.

    Attributes:
        tables: indices of its tables.
        options: cheapest for the mean rank first, without those that another one beats wherever
            they go.
        families: the cheapest layout of each family, cheapest first; for reports.
        rivals: items that must share no rank with it.
    """

    tables: tuple[int, ...]
    options: tuple[Option, ...]
    families: tuple[Option, ...] = ()
    rivals: tuple[int, ...] = ()

    def least(self, price: Callable[[Option], T]) -> T:
        """The least of a price over its options."""
        return min(map(price, self.options))

    @classmethod
    def from_options(cls, tables: tuple[int, ...], options: Sequence[Option]) -> Item:
        """An item from all options of its tables."""
        # simpler kinds first among equals
        ordered = sorted(options, key=lambda option: option.mean_s)
        families: dict[tuple[bool, bool, bool], Option] = {}
        kept: list[Option] = []
        for option in ordered:
            families.setdefault(option.family, option)
            if not any(_beats(other, option) for other in kept):
                kept.append(option)
        return cls(tables, tuple(kept), tuple(families.values()))


def _beats(a: Option, b: Option) -> bool:
    """Return True if `a` is at least as good wherever `b` goes, on no more ranks.

    It is asked only where `a` costs no more for the mean rank.
    """
    return (
        a.num_ranks <= b.num_ranks
        and a.peak_s <= b.peak_s
        and a.home_s <= b.home_s
        and a.most_bytes <= b.most_bytes
        and a.home_bytes <= b.home_bytes
        # Even pieces are told by the largest; uneven ones are compared position by position.
        and (
            a.num_ranks < b.num_ranks
            or not _is_uneven(b)
            or all(x <= y for x, y in zip(a.num_bytes, b.num_bytes, strict=True))
        )
        # `a` finds its ranks wherever `b` finds its own.
        and len(a.sites) == 1
        and (len(a.sites[0]) > a.num_ranks or a.sites == b.sites)
        and set(b.sites[0]) <= set(a.sites[0])
        and len(b.sites[0]) <= len(a.sites[0])
    )


def _is_uneven(option: Option) -> bool:
    return min(option.num_bytes) < 0.8 * max(option.num_bytes)
