"""The moments of a run at which ranks can be struck, as they are seen from outside.

A rank shows what it does in a file of a folder that its environment names. That a run recovers is
told by the run's events. Moments that were struck less often come first, so that a few faults meet
all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from rayrec.chaos.schedule import known_words

# the phase that a rank shows during each moment
DOING = {
    "start": "importing torch",
    "join": "meeting the other ranks",
    "train": "training",
    "save": "saving a checkpoint",
    "evaluate": "evaluating",
}
RECOVER = "recover"
MOMENTS = (*DOING, RECOVER)


class AtHand(NamedTuple):
    """Moment that has come, and the ranks that can be struck in it."""

    moment: str
    ranks: tuple[int, ...]


class Moments:
    """Choice among the moments that have come.

    Args:
        wanted: names of `MOMENTS`; without any, faults wait for no moment.
        faults: largest number of faults in a run. Each moment gets its share of them, or those
            that come first would take all.
    """

    def __init__(self, wanted: Collection[str] = (), faults: int | None = None) -> None:
        self.wanted = tuple(wanted)
        self._most = math.inf if faults is None else -(-faults // max(1, len(self.wanted)))
        self._struck: Counter[str] = Counter()
        self._last = ""

    def at_hand(self, doing: Mapping[int, Collection[str]], *, recovers: bool) -> AtHand | None:
        """Return the moment to strike at now, or None.

        Args:
            doing: moments of each rank, by its process.
            recovers: the run recovers from a fault.
        """
        there: dict[str, tuple[int, ...]] = {}
        for moment in self.wanted:
            at_all = moment == RECOVER and recovers
            in_it = tuple(rank for rank, its in doing.items() if at_all or moment in its)
            if in_it:
                there[moment] = in_it
        # A start that is struck again and again would leave no other moment.
        left = [m for m in there if m != self._last or len(self.wanted) == 1]
        best = min(left, key=self._struck.__getitem__, default="")
        return AtHand(best, there[best]) if best and self._struck[best] < self._most else None

    def struck(self, moment: str) -> None:
        """Count a fault that struck at a moment."""
        self._struck[moment] += 1
        self._last = moment


def doing(folder: Path, process: int) -> frozenset[str]:
    """Return the moments that a rank is in, from the phase in its file."""
    try:
        shown = (folder / str(process)).read_text()
    except OSError:  # the rank has not begun
        return frozenset()
    return frozenset(moment for moment, words in DOING.items() if words == shown)


def moment_words(text: str) -> tuple[str, ...]:
    """Parse moments such as "join,save".

    Raises:
        ConfigError: one is not known, or is given twice.
    """
    words = tuple(word.strip() for word in text.split(","))
    return known_words(words, MOMENTS, "moment of a run")
