"""What a run is to do, decided once its ranks have their places, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayrec.driver.recovery import Recovery
from rayrec.layout import ShardingPlan
from rayrec.layout.estimates import RankEstimate
from rayrec.train.callbacks import RunInfo
from rayrec.train.seat import RankTask


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the ranks are to do.

    Attributes:
        task: for every rank; None ends the run before anything is done.
        plan: where the tables of the task lie; None where it has none.
        predicted: seconds of a step by rank, as the plan's prices tell; empty where nobody asks.
        first: what they do before it, together with ranks that leave the run; None for nothing.
        info: what callbacks are told when it begins; None where there are none to tell.
    """

    task: RankTask | None
    plan: ShardingPlan | None = None
    predicted: tuple[RankEstimate, ...] = ()
    info: RunInfo | None = None
    first: RankTask | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a task.

    Attributes:
        prepared: what the ranks were to do.
        results: the task's result by rank; empty without a task.
        signal_number: the signal that ended the run early, or None.
        recovery: the account of its failures.
        resizes: how often it went on with another number of ranks.
    """

    prepared: Prepared
    results: tuple[Any, ...] = ()
    signal_number: int | None = None
    recovery: Recovery = field(default_factory=Recovery)
    resizes: int = 0
