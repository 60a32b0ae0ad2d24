"""`Placed`: what a controller works with once the cluster has room for its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.driver.changing import Changing
from rayrec.driver.handing import Handing
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.rank_start import Crew
from rayrec.driver.seating import Seating


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Ranks of a run, and the objects that manage them.

    Attributes:
        crew: the actors of the ranks.
        group: the same ranks, as a group that runs a task.
        seating: assigns ranks to places.
        changing: changes the number and the places of the ranks.
        handing: transfers tables between the ranks at such a change.
    """

    crew: Crew
    group: RankGroup
    seating: Seating
    changing: Changing
    handing: Handing
