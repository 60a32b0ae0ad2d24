"""Account of a run under faults, from the events in its folder, and the verdict on the run.

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
    """Injected fault.

    Attributes:
        at: time in seconds of the wall clock.
        moment: moment of the run that it waited for, one of `moments.MOMENTS`, or "".
    """

    at: float
    kind: str
    pids: tuple[int, ...]
    moment: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Failures, recoveries and lost time of one run.

    Attributes:
        recoveries: number of times the run went on, by itself or with another driver.
        waits: seconds from a fault to the next finished step. Faults that strike before that step
            belong to the first of them.
        repeated: number of steps that were done again, as far as events tell.
    """

    failures: int = 0
    recoveries: int = 0
    waits: tuple[float, ...] = ()
    repeated: int = 0


def account(events: Sequence[RunEvent], blows: Sequence[InjectedFault]) -> Account:
    """Count the failures, recoveries and lost time of a run, from events and faults in order."""
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
class RunRecord:
    """Record of a run under faults, from its start to its end.

    Attributes:
        words: reason of the end, where it is not done.
        digests: digests of the tables and the dense part; empty where it is not done.
    """

    seed: int
    end: End
    words: str = ""
    seconds: float = 0.0
    blows: tuple[InjectedFault, ...] = ()
    account: Account = field(default_factory=Account)
    digests: Mapping[str, str] = field(default_factory=dict)

    def others(self, expected: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of tables and parts whose digests differ from the run without faults."""
        names = sorted({*self.digests, *expected})
        return tuple(n for n in names if self.digests.get(n) != expected.get(n))

    def verdict(self, expected: Mapping[str, str]) -> str:
        """Return "same tables", or the failure of the run."""
        if self.end != "done":
            return f"{self.end}: {self.words}"
        others = self.others(expected)
        if not others:
            return "same tables"
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"OTHER TABLES: {', '.join(others[:3])}{more}"

    def is_good(self, expected: Mapping[str, str]) -> bool:
        """Return True if the run ended with the same digests as the one without faults."""
        return self.end == "done" and not self.others(expected)


def table(
    runs: Sequence[RunRecord], expected: Mapping[str, str], kinds: Sequence[str]
) -> list[str]:
    """Return the runs as a Markdown table, with their sum where they are several."""
    heads = ["seed", *kinds, "failures", "recoveries", "to the next step, median", "worst"]
    heads += ["steps repeated", "seconds", "verdict"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for run in runs:
        lines.append(_row(_cells(str(run.seed), [run], kinds, run.verdict(expected))))
    if len(runs) > 1:
        good = sum(run.is_good(expected) for run in runs)
        lines.append(_row(_cells("all", runs, kinds, f"{good} of {len(runs)} the same tables")))
    return lines


def _cells(name: str, runs: Sequence[RunRecord], kinds: Sequence[str], verdict: str) -> list[str]:
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
