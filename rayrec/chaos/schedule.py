"""Options of a campaign, and the fault schedule of a run: kind, time and target of each fault.

Every kind comes once before any comes again, so that a short run meets all of them. After that
SIGKILL comes more often than the others, because it costs the least time. One fault in ten strikes
two ranks at once. Gaps between faults are drawn from an exponential distribution, so that some
faults strike while the run still recovers from the one before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayrec.checks import check_once
from rayrec.errors import ConfigError

DRIVER, NODE, GCS = "driver", "node", "gcs"
SIGNALS = ("KILL", "STOP", "TERM", "ABRT", "SEGV")
WEIGHTS = {"KILL": 1.0, DRIVER: 0.03, NODE: 0.1, GCS: 0.03}
OTHER_WEIGHT = 0.2
TWO_AT_ONCE = 0.1
LONGEST_GAP = 4.0  # in mean gaps: no seed leaves a run in peace for very long


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """Options of a fault injection campaign; the help of `rayrec chaos` describes them.

    Attributes:
        every_s: mean seconds between two faults.
        moments: moments at which signals strike ranks; without any, at any time.
        seed: seed of the first run under faults; later runs have the next numbers.
        faults: largest number of faults in a run; None strikes until the end.
        hang_s: seconds without a new step, a fault or an announced pause after which a run counts
            as hung.
    """

    every_s: float
    signals: tuple[str, ...]
    moments: tuple[str, ...]
    driver: bool
    nodes: bool
    gcs: bool
    seed: int
    runs: int
    faults: int | None
    hang_s: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of faults that can strike."""
        others = {DRIVER: self.driver, NODE: self.nodes, GCS: self.gcs}
        return (*self.signals, *(kind for kind, wanted in others.items() if wanted))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Scheduled fault.

    Attributes:
        after_s: seconds since the fault before it, or since the start of the run.
        kind: a word of `SIGNALS`, "driver", "node" or "gcs".
        share: number from 0 to below 1 that selects the rank among those that run.
        ranks: number of ranks that a signal strikes at once.
    """

    after_s: float
    kind: str
    share: float
    ranks: int = 1

    def struck(self, candidates: Sequence[int]) -> tuple[int, ...]:
        """Return the processes to strike among the candidates."""
        first = int(self.share * len(candidates))
        around = (*candidates[first:], *candidates[:first])
        return around[: self.ranks]


def schedule(seed: int, every_s: float, kinds: Sequence[str]) -> Iterator[Fault]:
    """Yield the faults of one run, without an end.

    Args:
        every_s: mean seconds between two of them.
        kinds: at least one.
    """
    draw = random.Random(seed)
    first = draw.sample(list(kinds), len(kinds))
    weights = [WEIGHTS.get(kind, OTHER_WEIGHT) for kind in kinds]
    while True:
        kind = first.pop() if first else draw.choices(kinds, weights)[0]
        yield Fault(
            after_s=min(draw.expovariate(1 / every_s), LONGEST_GAP * every_s),
            kind=kind,
            share=draw.random(),
            ranks=2 if draw.random() < TWO_AT_ONCE else 1,
        )


def signal_words(text: str) -> tuple[str, ...]:
    """Parse signals such as "KILL,STOP"; SIGKILL and kill mean KILL.

    Raises:
        ConfigError: one is not known, or is given twice.
    """
    words = (word.strip().upper().removeprefix("SIG") for word in text.split(","))
    return known_words(tuple(words), SIGNALS, "signal for ranks")


def known_words(words: tuple[str, ...], known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return words of an option, each of which is known and comes once; `what` names one of them.

    Raises:
        ConfigError: one is not known, or is given twice.
    """
    for word in words:
        if word not in known:
            raise ConfigError(
                f"{word or ','.join(words)!r} is no {what}; choose from {', '.join(known)}."
            )
    return check_once(words)
