"""`WindowCutter`: cuts windows from a source and writes them into the run's folder.

Rank 0 cuts, in a thread beside its training, up to some windows ahead. A window takes rows in the
order in which the source gives them, so the cursor of its record says all that was taken. What is
no longer known after a crash is a window without a record, and nobody was trained on it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from rayrec.data.column_types import check_columns
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.streaming.bad_rows import Binary, event_seconds, sift
from rayrec.streaming.config import StreamConfig
from rayrec.streaming.source import Cursor, Polled, StreamSource
from rayrec.streaming.window_log import WindowLog, WindowRecord

# rows of one poll
PIECE_ROWS = 8_192
# seconds between two polls of a source that has none
POLL_S = 0.05
# refused parts whose names a record has
MOST_PARTS = 100


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class WindowCutter:
    """Cutter of the windows of one stream.

    Args:
        source: the source, which this cutter alone polls.
        log: the windows that are cut.
        binary: label columns that may hold nothing but 0 and 1.
        pause: waits for some seconds; returns True where the cutter is to give up.
        clock: seconds of a clock that never jumps. now: seconds since 1970.
    """

    def __init__(
        self,
        source: StreamSource,
        log: WindowLog,
        schema: FeatureSchema,
        config: StreamConfig,
        binary: Binary = False,
        pause: Callable[[float], bool] = _sleep,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._source, self._log, self._config = source, log, config
        self._schema, self._binary = schema, binary
        self._pause, self._clock, self._now = pause, clock, now

    def cut(self) -> WindowRecord | None:
        """Cut the window after the newest one, or return None where the stream ends or it gives up.

        Raises:
            InputError: the source has lost events.
            SaveError: the window cannot be written.
        """
        config, newest = self._config, self._log.newest()
        stop, total = config.stop, 0 if newest is None else newest.total_rows
        window = 0 if newest is None else newest.window + 1
        if window >= (stop.windows or window + 1) or total >= (stop.rows or total + 1):
            return None
        cursor = self._source.start() if newest is None else newest.after
        draft = _Draft(self, window, cursor, None if newest is None else newest.watermark)
        most = config.rows if stop.rows is None else min(config.rows, stop.rows - total)
        quiet, first = self._clock(), float("inf")
        while draft.rows < most and self._clock() - first < config.wait_s:
            polled = self._source.poll(draft.cursor, min(PIECE_ROWS, most - draft.rows))
            if polled is None:
                if stop.idle_s is not None and self._clock() - quiet >= stop.idle_s:
                    if not draft.rows:
                        return None
                    break
                if self._pause(POLL_S):
                    return None
                continue
            quiet = self._clock()
            fitting = draft.fitting(polled)
            if fitting is not None and fitting > 0:
                # the cursor behind these rows is the source's to say
                polled = self._source.poll(draft.cursor, fitting)
                assert polled is not None, "a source gives the rows of its last answer again"
            if fitting != 0:
                draft.take(polled)
            if fitting is not None and draft.rows:
                break
            if fitting is not None:
                draft.begin_anew()  # all rows of this event time were refused
            if draft.rows and first == float("inf"):
                first = self._clock()
        return self._log.add(draft.record(total, self._now()), draft.pieces)


class _Draft:
    """A window that is being cut."""

    def __init__(
        self, cutter: WindowCutter, window: int, cursor: Cursor, watermark: float | None
    ) -> None:
        self._cutter, self._config = cutter, cutter._config
        self.window, self.before, self.cursor = window, cursor, cursor
        # late is what is older than the windows before
        self._known, self._watermark = watermark, watermark
        self._end: float | None = None
        self.pieces: list[pa.Table] = []
        self.rows, self._files = 0, 0
        self._ingested = 0.0
        self._events: list[float] = []
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._parts: dict[str, str] = {}

    def fitting(self, polled: Polled) -> int | None:
        """Return the number of the rows that belong to this window; None for all of them."""
        rows, config = polled.rows, self._config
        if rows is None or not rows.num_rows:
            return None
        if self.pieces:
            kept = self._kept_columns(rows)
            # columns of another type begin a window, since a file has one type for each
            if kept is None or not rows.select(kept).schema.equals(self.pieces[0].schema):
                return 0 if kept is not None else None
        if config.window_s is None or config.event_time not in rows.column_names:
            return None
        times = self._times(rows)
        known = times[self._on_time(times)]
        if not len(known):
            return None
        if self._end is None:
            base = max(known[0], -np.inf if self._known is None else self._known)
            self._end = (base // config.window_s + 1) * config.window_s
        behind = np.flatnonzero(self._on_time(times) & (times >= self._end))
        return int(behind[0]) if len(behind) else None

    def begin_anew(self) -> None:
        """Take the event time of the window from the next row."""
        self._end = None

    def take(self, polled: Polled) -> None:
        """Add the rows of a poll, and keep those apart that cannot be trained on."""
        self.cursor = polled.cursor
        self._ingested = max(self._ingested, polled.ingested)
        for part in polled.refused:
            self._refused["parts of the source"] += 1
            if len(self._parts) < MOST_PARTS:
                self._parts[part.name] = part.why
        rows = polled.rows
        if rows is None or not rows.num_rows:
            return
        kept = self._kept_columns(rows)
        if kept is None:
            self._refuse(rows, "other columns")
            return
        rows = rows.select(kept)
        if self._config.event_time is not None:
            rows = self._timed(rows)
        good, bad = sift(rows, self._cutter._schema, self._cutter._binary)
        if bad.num_rows:
            self._refuse(bad, "rows that cannot be read")
        if good.num_rows:
            self.pieces.append(good)
            self.rows += good.num_rows

    def record(self, total: int, now: float) -> WindowRecord:
        """Return the record of the window."""
        return WindowRecord(
            window=self.window,
            rows=self.rows,
            total_rows=total + self.rows,
            file=self._cutter._log.new_name(self.window),
            before=self.before,
            after=self.cursor,
            first_event=min(self._events, default=None),
            last_event=max(self._events, default=None),
            watermark=self._watermark,
            ingested=self._ingested,
            cut=now,
            late=self._counts["late"],
            ahead=self._counts["ahead"],
            refused=dict(self._refused),
            parts=self._parts,
        )

    def _kept_columns(self, rows: pa.Table) -> list[str] | None:
        """Return the columns of a window, or None where rows do not have them."""
        wanted = list(self._cutter._schema.columns())
        time_of = self._config.event_time
        try:
            check_columns(rows.schema, self._cutter._schema, "the stream")
        except InputError:
            return None
        if time_of is not None:
            if rows.schema.names.count(time_of) != 1:
                return None
            wanted.append(time_of)
        return list(dict.fromkeys(wanted))

    def _timed(self, rows: pa.Table) -> pa.Table:
        """Count late events and those ahead, and keep apart what has no time or is dropped."""
        times = self._times(rows)
        on_time = self._on_time(times)
        out = np.isnan(times)
        if out.any():
            self._refuse(rows.filter(pa.array(out)), "rows without an event time")
        late = np.zeros(len(times), bool)
        if self._known is not None:
            late = times < self._known - self._config.late_by_s
        self._counts["late"] += int(late.sum())
        self._counts["ahead"] += int((~on_time & ~out).sum())
        if self._config.late == "drop" and late.any():
            self._refuse(rows.filter(pa.array(late)), "late rows")
            out |= late
        kept = times[~out]
        if len(kept):
            self._events += [float(kept.min()), float(kept.max())]
        known = times[on_time & ~out]
        if len(known):
            newest = float(known.max())
            self._watermark = newest if self._watermark is None else max(self._watermark, newest)
        return rows.filter(pa.array(~out)) if out.any() else rows

    def _times(self, rows: pa.Table) -> np.ndarray:
        assert self._config.event_time is not None
        return event_seconds(rows.column(self._config.event_time), self._config.event_unit)

    def _on_time(self, times: np.ndarray) -> np.ndarray:
        """Return True for event times that the clock of this machine allows."""
        return times <= self._cutter._now() + self._config.most_ahead_s  # False for nan, too

    def _refuse(self, rows: pa.Table, why: str) -> None:
        self._refused[why] += rows.num_rows
        self._cutter._log.keep_refused(self.window, self._files, rows)
        self._files += 1
