"""What a run under faults went through, by the events in its folder; and the verdict on it.

A fault is over with the next step that is finished after it in a later life of the run: the first
window of events after a recovery, or after the start of another driver, ends with that step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from rayrec.watch.events import RunEvent

End = Literal["done", "failed", "hung"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """A fault that struck.

    Attributes:
        at: seconds of the wall clock.
        kind: see `schedule.Fault`.
        pids: the processes that it struck.
        moment: of the run, where it waited for one; see `moments.MOMENTS`.
    """

    at: float
    kind: str
    pids: tuple[int, ...]
    moment: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What one run went through.

    Attributes:
        failures: those that the driver told of.
        recoveries: how often the run went on, by itself or with another driver.
        waits: seconds from a fault to the next finished step. Faults that strike before that step
            belong to the first of them.
        repeated: steps that were done again, as far as events tell.
    """

    failures: int = 0
    recoveries: int = 0
    waits: tuple[float, ...] = ()
    repeated: int = 0


def account(events: Sequence[RunEvent], blows: Sequence[InjectedFault]) -> Account:
    """Account for a run.

    Args:
        events: all of them, in the order in which they were written.
        blows: in the order in which they struck.
    """
    first_steps: list[float] = []
    begins = False
    reached = repeated = 0
    for event in events:
        if event.kind in ("start", "recovery"):
            repeated += max(0, reached - event.step)
            reached, begins = event.step, True
        elif event.kind in ("window", "failure"):
            reached = max(reached, event.step)
        if event.kind == "window" and begins:
            first_steps.append(event.at)
            begins = False
    waits = []
    last = 0.0
    for blow in blows:
        end = next((at for at in first_steps if at > blow.at), last)
        if end > last:
            waits.append(end - blow.at)
            last = end
    return Account(
        failures=sum(event.kind == "failure" for event in events),
        recoveries=max(0, len(first_steps) - 1),
        waits=tuple(waits),
        repeated=repeated,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run under faults, from its start to the verdict.

    Attributes:
        seed: of its faults.
        end: how it ended.
        words: why, where it is not done.
        seconds: from its first start to its end.
        blows: the faults that struck.
        account: what it went through.
        digests: by table, and of the dense part; empty where it is not done.
    """

    seed: int
    end: End
    words: str = ""
    seconds: float = 0.0
    blows: tuple[InjectedFault, ...] = ()
    account: Account = field(default_factory=Account)
    digests: Mapping[str, str] = field(default_factory=dict)

    def others(self, expected: Mapping[str, str]) -> tuple[str, ...]:
        """What differs from the run without faults: see `digests`."""
        names = sorted({*self.digests, *expected})
        return tuple(n for n in names if self.digests.get(n) != expected.get(n))

    def verdict(self, expected: Mapping[str, str]) -> str:
        """ "same tables", or what went wrong."""
        if self.end != "done":
            return f"{self.end}: {self.words}"
        others = self.others(expected)
        if not others:
            return "same tables"
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"OTHER TABLES: {', '.join(others[:3])}{more}"

    def is_good(self, expected: Mapping[str, str]) -> bool:
        """Whether the run ended as the one without faults did."""
        return self.end == "done" and not self.others(expected)


def table(runs: Sequence[Run], expected: Mapping[str, str], kinds: Sequence[str]) -> list[str]:
    """The runs as Markdown, and their sum where they are several.

    Args:
        expected: digests of the run without faults.
        kinds: of the faults that could strike.
    """
    heads = ["seed", *kinds, "failures", "recoveries", "to the next step, median", "worst"]
    heads += ["steps repeated", "seconds", "verdict"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for run in runs:
        lines.append(_row(_cells(str(run.seed), [run], kinds, run.verdict(expected))))
    if len(runs) > 1:
        good = sum(run.is_good(expected) for run in runs)
        lines.append(_row(_cells("all", runs, kinds, f"{good} of {len(runs)} the same tables")))
    return lines


def _cells(name: str, runs: Sequence[Run], kinds: Sequence[str], verdict: str) -> list[str]:
    struck = Counter(blow.kind for run in runs for blow in run.blows for _ in blow.pids)
    accounts = [run.account for run in runs]
    waits = [wait for each in accounts for wait in each.waits]
    typical = median(waits) if waits else math.nan
    worst = max(waits, default=math.nan)
    return [
        name,
        *(str(struck[kind]) for kind in kinds),
        str(sum(each.failures for each in accounts)),
        str(sum(each.recoveries for each in accounts)),
        *(f"{s:.1f} s" if waits else "none" for s in (typical, worst)),
        str(sum(each.repeated for each in accounts)),
        f"{sum(run.seconds for run in runs):.0f}",
        verdict,
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
