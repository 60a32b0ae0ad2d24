"""Task of a run, made once its ranks have their places, and the outcome of the task."""

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
    """Task for the ranks, with its plan.

    Attributes:
        task: task of every rank; None ends the run at once.
        plan: sharding plan of the task's tables, or None.
        predicted: seconds of a step that the cost model expects, by rank; may be empty.
        first: task to run before it, together with ranks that leave the run, or None.
        info: facts that callbacks receive when the task begins, or None.
    """

    task: RankTask | None
    plan: ShardingPlan | None = None
    predicted: tuple[RankEstimate, ...] = ()
    info: RunInfo | None = None
    first: RankTask | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """Outcome of a task.

    Attributes:
        prepared: task that the ranks ran.
        results: the task's result by rank; empty without a task.
        signal_number: the signal that ended the run early, or None.
        recovery: the account of its failures.
        resizes: number of times it went on with another number of ranks.
    """

    prepared: Prepared
    results: tuple[Any, ...] = ()
    signal_number: int | None = None
    recovery: Recovery = field(default_factory=Recovery)
    resizes: int = 0
