"""Measured seconds of a training step by part, for timers and pages.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# in the order of a step; those of `rates.PARTS` are the embedding's, which have a price
STEP_PARTS = {
    "data": "waiting for the next batch",
    "input": "ids to the ranks that own their rows",
    "lookup": "rows read and pooled",
    "output": "rows home to the batch, joined",
    "dense": "forward of all other layers, loss",
    "backward": "their backward, gradients averaged",
    "gradient": "gradients of rows to their owners",
    "update": "rows and optimizer state updated",
    "optimizer": "dense optimizer",
}


class PartTimes(NamedTuple):
    """Seconds of one part.

    Attributes:
        seconds: seconds of the step in this part, without parts within it.
        waited: share of `seconds` that passed in waiting for other ranks, in seconds.
        ahead: seconds beside the step before, in a thread of its own; no part of the step.
        ahead_waited: seconds of `ahead` that passed in waiting.
    """

    seconds: float = 0.0
    waited: float = 0.0
    ahead: float = 0.0
    ahead_waited: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The mean step of one rank.

    Attributes:
        parts: times of every one of `STEP_PARTS`.
        step_s: seconds of the whole step.
        waits: times that the step stopped for other ranks.
        faults: minor page faults of the process. cpu_s: CPU seconds of all its threads.
    """

    parts: Mapping[str, PartTimes]
    step_s: float
    waits: float = 0.0
    faults: float = 0.0
    cpu_s: float = 0.0

    @property
    def ahead(self) -> bool:
        """True if the input was exchanged beside the step before, so that it is only awaited."""
        return self.parts["input"].ahead > 0

    @property
    def waited_s(self) -> float:
        """Seconds of the step spent waiting for other ranks."""
        return sum(part.waited for part in self.parts.values())

    @property
    def rest_s(self) -> float:
        """Seconds of the step outside of all parts."""
        return self.step_s - sum(part.seconds for part in self.parts.values())
