"""`Growth`: when a run looks at its dynamic tables, and doubles those that are filled.

The steps follow from the config alone, and windows end at them, so a table grows at the same step
on any number of ranks, and in a run that was killed and resumed. All ranks call the same methods
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rayrec.train.every import Every
from rayrec.train.run_state import LiveRun


class Growth:
    """Growth of the tables of one rank of a run."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        # the step that was looked at last; None before the first window
        self._looked: int | None = None

    def next_step(self, step: int) -> int | None:
        """Return the next step after which a table is looked at; None where none grows."""
        steps = [every.next_step(step) for every in self._tables().values()]
        return min((step for step in steps if step is not None), default=None)

    def begin(self) -> None:
        """Begin a window, or go on from a checkpoint, whose step was looked at before."""
        self._looked = self._live.step

    def after_step(self) -> Mapping[str, int]:
        """Double the tables that are due and filled, once after a step; return the rows of each."""
        step = self._live.step
        if self._looked in (None, step):
            return {}
        self._looked = step
        due = [name for name, every in self._tables().items() if every.due(step)]
        return self._live.model.grow(due) if due else {}

    def _tables(self) -> dict[str, Every]:
        """Return when each table is looked at, which amid a sum of gradients it is not."""
        return {
            table.name: Every(math.lcm(growth.every_n_steps, self._live.spec.accumulate))
            for table in self._live.model.tables
            if table.dynamic is not None and (growth := table.dynamic.growth) is not None
        }
