"""`wait_before`: the back-off before what has ended is started again."""

from __future__ import annotations

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_MOST_DOUBLINGS = 10  # more reach beyond the longest wait, and some day beyond a float


def wait_before(failed: int) -> float:
    """Return the seconds before the next start, after so many ends in a row, at least one."""
    return min(_FIRST_WAIT_S * 2 ** min(failed - 1, _MOST_DOUBLINGS), _LONGEST_WAIT_S)
