"""`Placed`: what a controller works with once the cluster has room for its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.driver.assignment import Assignment
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.resizing import Resizing
from rayrec.driver.table_transfer import TableTransfer
from rayrec.driver.worker_group import WorkerGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Ranks of a run, and the objects that manage them.

    Attributes:
        workers: the actors of the ranks.
        group: the same ranks, as a group that runs a task.
        assignment: assigns ranks to places.
        resizing: changes the number and the places of the ranks.
        transfer: transfers tables between the ranks at such a change.
    """

    workers: WorkerGroup
    group: RankGroup
    assignment: Assignment
    resizing: Resizing
    transfer: TableTransfer
