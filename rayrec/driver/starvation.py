"""Tells a user whose ranks wait for data: who, how much, and what to try.

Every report says for each rank which share of its time it waited for the next batch. Shares are
averaged over the reports of several steps, without the first report, whose one step also waits for
files to be opened; a tenth or more is worth a line, now and then.
"""

from __future__ import annotations

import time

from rayrec.train.events import ProgressReport

# share of the time from which waiting is worth a line
SHARE = 0.1
MIN_STEPS = 4
# seconds between two lines
QUIET_S = 60.0

_REMEDY = (
    "Reading is slower than training. Try files on a local disk, uncompressed Arrow IPC files "
    "(ArrowDataset), which are mapped and not decoded, row groups of 10,000 to 100,000 rows, a "
    "schema with fewer columns, or a host with more cores than ranks."
)


class StarvationWatch:
    """Looks at the reports of one run, in order."""

    def __init__(self) -> None:
        # step of the last report
        self._step: int | None = None
        self._steps = 0
        # by rank, the sum of share times steps
        self._waited: list[float] = []
        self._said_at: float | None = None

    def see(self, report: ProgressReport) -> str | None:
        """Return the line to print after this report, or None."""
        steps = 0 if self._step is None else report.step - self._step
        self._step = report.step
        # the first of a run, or of the world after a failure
        if steps <= 0 or len(self._waited) != len(report.data_wait):
            self._steps, self._waited = 0, [0.0] * len(report.data_wait)
            return None
        self._steps += steps
        for rank, share in enumerate(report.data_wait):
            self._waited[rank] += steps * share
        if self._steps < MIN_STEPS:
            return None
        over = self._steps
        shares = [waited / over for waited in self._waited]
        self._steps, self._waited = 0, [0.0] * len(shares)
        starved = [rank for rank, share in enumerate(shares) if share >= SHARE]
        now = time.monotonic()
        if not starved or (self._said_at is not None and now < self._said_at + QUIET_S):
            return None
        self._said_at = now
        worst = max(starved, key=lambda rank: shares[rank])
        who = f"rank {worst}"
        if len(starved) > 1:
            who = f"{len(starved)} of {len(shares)} ranks, most of them rank {worst},"
        return (
            f"data: {who} waited for batches {shares[worst]:.0%} of the time of the last {over} "
            f"steps. {_REMEDY}"
        )
