"""The moments of a run at which ranks can be struck, as they are seen from outside.

A rank shows what it does in a file of a folder that its environment names. That a run recovers is
told by the run's events. Moments that were struck less often come first, so that a few faults meet
all of them.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

# what a rank shows meanwhile
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
    """A moment that has come, and the ranks that can be struck in it."""

    moment: str
    ranks: tuple[int, ...]


class Moments:
    """Chooses among the moments that have come.

    Args:
        wanted: of `MOMENTS`; without any, each moment is as good as another.
    """

    def __init__(self, wanted: Collection[str] = ()) -> None:
        self.wanted = tuple(wanted)
        self._struck: Counter[str] = Counter()
        self._last = ""

    def at_hand(self, doing: Mapping[int, Collection[str]], *, recovers: bool) -> AtHand | None:
        """The moment to strike at now, or None.

        Args:
            doing: process of a rank -> the moments that it is in.
            recovers: the run recovers from a fault.
        """
        there: dict[str, tuple[int, ...]] = {}
        for moment in self.wanted:
            at_all = moment == RECOVER and recovers
            in_it = tuple(rank for rank, its in doing.items() if at_all or moment in its)
            if in_it:
                there[moment] = in_it
        # one that never came before counts from now on
        self._struck.update(dict.fromkeys(there, 0))
        least = min(self._struck.values(), default=0)
        # A start that is struck again and again would leave no other moment.
        left = [m for m in there if m != self._last or len(self.wanted) == 1]
        best = min(left, key=self._struck.__getitem__, default=None)
        # some come in a recovery alone, so that waiting for the least of all would take too long
        if best is None or self._struck[best] > least + 1:
            return None
        return AtHand(best, there[best])

    def struck(self, moment: str) -> None:
        """Note that a fault struck."""
        self._struck[moment] += 1
        self._last = moment


def doing(folder: Path, process: int) -> frozenset[str]:
    """The moments that a rank is in, by what it shows in a folder."""
    try:
        shown = (folder / str(process)).read_text()
    except OSError:  # it has not begun
        return frozenset()
    return frozenset(moment for moment, words in DOING.items() if words == shown)


def moment_words(text: str) -> tuple[str, ...]:
    """Parse moments such as "join,save".

    Raises:
        argparse.ArgumentTypeError: one is not known, or is given twice.
    """
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in MOMENTS:
            known = ", ".join(MOMENTS)
            raise ArgumentTypeError(f"{word or text!r} is no moment of a run; choose from {known}")
    if len(set(words)) < len(words):
        raise ArgumentTypeError(f"{text!r} names a moment twice; name it once")
    return words
