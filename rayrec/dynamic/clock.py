"""`IdClock`: the steps and the time by which ids grow old; `Dynamic`: what a kernel is told of its
tables.

The time is that of the data, in seconds since 1970, and no clock of a machine has a say in it: that
of a step is the largest which the data has told until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.tables import BaseEmbeddingConfig

NO_TIME = -1


class Instant(NamedTuple):
    """A training step of a table, and the time of the data in it.

    Attributes:
        time: seconds since 1970; `NO_TIME` where no data has told one, or no table asks for it.
    """

    step: int = 0
    time: int = NO_TIME

    def is_fresh(self, rule: DynamicConfig, seen: Any, time: Any) -> Any:
        """Return (N,) whether ids were seen lately enough to be known by a rule that has a ttl.

        Args:
            seen, time: (N,) columns of ids, tensors or arrays; `time` is read for `ttl_s` alone.
        """
        if rule.ttl_s is not None:
            return time >= self.time - rule.ttl_s
        assert rule.ttl_steps is not None, "the rule has a ttl"
        return seen >= self.step - rule.ttl_steps

    def earlier(self, rule: DynamicConfig, lags: Any) -> Any:
        """Return (N,) stamps that lie so much before now, in what a rule's ttl counts.

        One may lie before 1970, and none is `NO_TIME`.
        """
        if rule.ttl_s is None:
            return self.step - lags
        times = self.time - lags
        return np.where(times == NO_TIME, NO_TIME - 1, times)


# before all stamps, which lie up to a ttl before the first step
NEVER = Instant(-(2**31), -(2**31))


def clock_extras(instants: Mapping[str, Instant]) -> dict[str, dict[str, int]]:
    """Return what a checkpoint says of the clocks of its dynamic tables, as JSON data."""
    steps = {table: instant.step for table, instant in instants.items()}
    times = {table: now.time for table, now in instants.items() if now.time != NO_TIME}
    return {name: told for name, told in (("id_steps", steps), ("id_times", times)) if told}


def clocks_in(extras: Mapping[str, Any]) -> dict[str, Instant]:
    """Return the instants that the extras of a checkpoint hold, by dynamic table."""
    times = extras.get("id_times", {})
    return {
        table: Instant(step, times.get(table, NO_TIME))
        for table, step in extras.get("id_steps", {}).items()
    }


@dataclass(slots=True)
class IdClock:
    """Training steps of a collection, and the time of its data, by which ids of its dynamic tables
    grow old.

    All ranks have it, also those without a row of the tables.

    Attributes:
        timed: a table asks for the time of the data.
        now: the step so far; a checkpoint carries it.
        trains: the step under way may give rows to ids and take them back.
    """

    timed: bool = False
    now: Instant = field(default_factory=Instant)
    trains: bool = False

    def begin(self, trains: bool, time: int) -> None:
        """Begin a step, which counts where it trains.

        Args:
            time: the largest of the batches of all ranks; the clock never goes back to an earlier
                one.
        """
        self.trains = trains
        if trains:
            time = max(self.now.time, time) if self.timed else NO_TIME
            self.now = Instant(self.now.step + 1, time)

    def go_to(self, saved: Sequence[Instant]) -> None:
        """Go to the latest of the instants that were saved of the tables; to none without any."""
        step = max((one.step for one in saved), default=0)
        time = max((one.time for one in saved), default=NO_TIME) if self.timed else NO_TIME
        self.now = Instant(step, time)


class Dynamic(NamedTuple):
    """Dynamic tables as their kernel gets them.

    Attributes:
        tables: of the shards of the kernel.
        seed: of first values and of the hash that admits a share of ids.
    """

    tables: tuple[BaseEmbeddingConfig, ...]
    seed: int
    clock: IdClock
