"""`WindowCutter`: cuts the rows of a source into windows, in a thread of rank 0.

Rows are tried as training will read them, so that a window holds none that would end the run: what
does not fit is left out, counted, and told in the folder of refused rows. The next window is cut
while the current one is trained on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import pyarrow as pa

from rayrec.data.column_types import plain_text
from rayrec.data.convert import to_batch
from rayrec.data.numeric import times_of
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.storage import one_line
from rayrec.streams.config import StreamConfig
from rayrec.streams.event_columns import best_auc, known_seconds, logits_of
from rayrec.streams.growing import GrowingWindow
from rayrec.streams.kept import StreamWindow, WindowFolder
from rayrec.streams.source import Refusal, StreamSource

MOST_REFUSALS = 100  # told one by one, of a piece; beyond them the rest of it goes as a whole
MOST_PIECES = 256  # of the rows of a window; each reading walks over them
LOOK_S = 1.0  # a look takes what is there for at least so long


class WindowCutter:
    """Cuts the windows of a run, one after another.

    Args:
        schema: what rows are tried by.
        binary: label columns that hold 0 and 1 alone.
    """

    def __init__(
        self,
        folder: WindowFolder,
        source: StreamSource,
        config: StreamConfig,
        schema: FeatureSchema,
        binary: bool | Sequence[str] = False,
    ) -> None:
        self._folder, self._source, self._config = folder, source, config
        self._schema, self._binary = schema, binary
        self._time = config.time or schema.time
        self._columns = list(schema.columns())
        for name in (self._time, config.truth):
            if name is not None and name not in self._columns:
                self._columns.append(name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._task: Future[StreamWindow | None] | None = None
        self._growing: GrowingWindow | None = None
        self._is_closing = False
        # when rows were seen last, and when the last look that saw none began
        self._seen = self._looked = time.monotonic()

    def is_idle(self, seconds: float) -> bool:
        """Return True if no row was seen for so long, and none is left to cut or to tell."""
        growing = self._growing
        is_empty = growing is None or not (growing.rows or growing.refusals[growing.told :])
        return is_empty and self._idle_s >= seconds

    @property
    def _idle_s(self) -> float:
        # a look may take long, and rows that it finds may have been there before
        return self._looked - self._seen

    def window(self, number: int) -> StreamWindow | None:
        """Return a window if it has been cut by now; else begin to cut it.

        Raises:
            RayrecError: the source cannot be read, or the window not be written.
        """
        self.begin(number)
        assert self._task is not None
        if not self._task.done():
            return None
        task, self._task = self._task, None
        return task.result()

    def begin(self, number: int) -> None:
        """Begin to cut a window in the thread, unless that is under way."""
        if self._task is None:
            self._task = self._thread.submit(self._cut, number)

    def wait(self, seconds: float) -> None:
        """Wait until a window that is being cut is there, or for so long."""
        if self._task is None:
            time.sleep(seconds)
        else:
            wait([self._task], seconds)

    def close(self) -> None:
        """End thread and source; what is being filled is read again from its cursor."""
        self._is_closing = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def _cut(self, number: int) -> StreamWindow | None:
        """Return a window that is there, or cut it if enough rows are; else None."""
        kept = self._folder.read(number)
        if kept is not None:
            self._seen = time.monotonic()
            return kept
        began, growing, config = time.monotonic(), self._begun(number), self._config
        most, is_full = config.rows, False
        if config.stop_after_rows is not None:
            most = min(most, config.stop_after_rows - growing.total)
        while growing.rows < most and not is_full and not self._is_closing:
            found = self._source.read(growing.cursor, most - growing.rows)
            if found is None:
                self._looked = began
                break
            if found.cursor == growing.cursor and not found.refused:
                raise InputError(f"stream {self._source.name} gives rows and no further cursor.")
            fitting = self._fitting_in_time(growing, found.rows)
            if fitting is not None:
                # the source knows the cursor behind them, and what it left out before them
                found = self._source.read(growing.cursor, fitting) if fitting else None
                is_full = not fitting or (found is not None and found.rows is not None)
            if found is not None:
                growing.cursor = found.cursor
                growing.refusals += found.refused
                if found.rows is not None and len(found.rows):
                    self._add(growing, found.rows, found.place, found.first)
            if is_full and not growing.rows:
                # all were refused, so the time of the window follows from the next row
                is_full, growing.end = False, None
            now = time.monotonic()
            if growing.since is None and (growing.rows or growing.refusals[growing.told :]):
                growing.since = now
            # a source that always has more does not hold up a window
            if now - max(began, growing.since or began) >= max(config.seconds, LOOK_S):
                break
        if not (is_full or growing.rows >= most or self._is_due(growing)):
            return None
        if growing.rows:
            return self._closed(growing)
        if growing.refusals[growing.told :]:
            self._tell(growing)
        return None

    def _tell(self, growing: GrowingWindow) -> None:
        """Tell what was refused while no row came that fits.

        Raises:
            InputError: the run has had no other row, as where its schema is another one.
        """
        self._folder.refuse(growing.number, growing.refusals)
        rows = sum(one.rows for one in growing.refusals)
        if not growing.number and rows:
            first = growing.refusals[0]
            raise InputError(
                f"none of the first {rows:,} rows of stream {self._source.name} can be trained on; "
                f"{first.place}: {first.reason}"
            )
        growing.told, growing.since = len(growing.refusals), None

    def _fitting_in_time(self, growing: GrowingWindow, rows: pa.Table | None) -> int | None:
        """Return the number of rows before the first that is past the window's event time, or None
        if all of them belong to the window. Rows that will be refused begin and end no window.
        """
        size = self._config.event_seconds
        if size is None or rows is None or not len(rows):
            return None
        if any(rows.schema.names.count(name) != 1 for name in self._columns):
            return None
        times = known_seconds(rows[self._time])
        if times is None or not (growing.end is None or (times >= growing.end).any()):
            return None
        fit = self._which_fit(rows.select(self._columns))
        if growing.end is None and len(fit):
            first = int(times[fit[0]])
            newest = first if growing.newest is None else max(first, growing.newest)
            growing.end = (newest // size + 1) * size
        past = fit if growing.end is None else fit[times[fit] >= growing.end]
        return int(past[0]) if len(past) else None

    def _which_fit(self, rows: pa.Table) -> np.ndarray:
        """Return the numbers of the rows that training can read."""
        apart, numbered = GrowingWindow(0, {}, None), rows.append_column("", [np.arange(len(rows))])
        fitting = self._fitting(apart, numbered, "", 0, MOST_REFUSALS)
        return np.concatenate([np.zeros(0, np.int64), *(table[""] for table in fitting)])

    def _begun(self, number: int) -> GrowingWindow:
        if self._growing is None or self._growing.number != number:
            self._folder.check_cut(number, is_begun=False)
            before = self._folder.read(number - 1) if number else None
            if number and before is None:
                raise InputError(
                    f"{self._folder.path} has no window {number - 1}, behind which window {number} "
                    "begins. Resume a checkpoint whose windows are kept, or begin a new run."
                )
            cursor = self._source.start() if before is None else before.after
            newest = None if before is None else before.newest_event
            total = 0 if before is None else before.total_rows
            self._growing = GrowingWindow(number, cursor, newest, total)
        return self._growing

    def _is_due(self, growing: GrowingWindow) -> bool:
        if growing.since is None:
            return False
        age, idle = time.monotonic() - growing.since, self._config.stop_when_idle_s
        return age >= self._config.seconds or (idle is not None and self._idle_s >= idle)

    def _add(self, growing: GrowingWindow, rows: pa.Table, place: str, first: int) -> None:
        self._seen = time.monotonic()
        for name in self._columns:
            count = rows.schema.names.count(name)
            if count != 1:
                why = f"{count or 'no'} column{'s'[:count]} {name!r}; it has {rows.schema.names}"
                growing.refusals.append(Refusal(place, why, len(rows)))
                return
        if growing.table is not None and growing.table[0].num_chunks > MOST_PIECES:
            with suppress(pa.ArrowException):  # as of dictionaries with many values
                growing.table = growing.table.combine_chunks()
        limit = len(growing.refusals) + MOST_REFUSALS
        rows = plain_text(rows.select(self._columns))
        for table in self._fitting(growing, rows, place, first, limit):
            before = [] if growing.table is None else [growing.table]
            try:
                # copies no values of equal types
                growing.table = pa.concat_tables([*before, table], promote_options="permissive")
            except pa.ArrowException as error:
                why = f"types of another kind than before: {one_line(error)}"
                growing.refusals.append(Refusal(place, why, len(table)))

    def _fitting(
        self, growing: GrowingWindow, rows: pa.Table, place: str, first: int, limit: int
    ) -> list[pa.Table]:
        """Return the rows that training can read, in order; each bad one is refused.

        Args:
            limit: refusals of the window from which on rows are refused as a whole.
        """
        try:
            self._try(rows, place, first)
        except (InputError, pa.ArrowException) as error:
            if len(rows) > 1 and len(growing.refusals) < limit:
                half = len(rows) // 2
                return [
                    *self._fitting(growing, rows.slice(0, half), place, first, limit),
                    *self._fitting(growing, rows.slice(half), place, first + half, limit),
                ]
            growing.refusals.append(Refusal(f"{place}, row {first}", str(error), len(rows)))
            return []
        return [rows]

    def _try(self, rows: pa.Table, place: str, first: int) -> None:
        to_batch(rows, self._schema, place, first, self._binary)
        if self._time is not None:
            column = rows[self._time].combine_chunks()
            times_of(column, self._time, lambda row: f"row {first + row} of {place}")
        if self._config.truth is not None:
            logits_of(rows, self._config.truth)

    def _closed(self, growing: GrowingWindow) -> StreamWindow:
        """Write a window and its record."""
        rows = growing.table
        assert rows is not None
        newest, late = growing.newest, 0
        if self._time is not None:
            times = times_of(rows[self._time].combine_chunks(), self._time, "row {}".format)
            late = 0 if newest is None else int((times < newest).sum())
            newest = max([int(times.max()), *([] if newest is None else [newest])])
        lag = self._source.lag(growing.cursor)
        file, crc32 = self._folder.write_rows(growing.number, rows)
        window = StreamWindow(
            number=growing.number,
            file=file,
            rows=len(rows),
            total_rows=growing.total + len(rows),
            after=dict(growing.cursor),
            cut_s=round(time.time(), 3),
            newest_event=newest,
            late=late,
            refused=sum(max(1, one.rows) for one in growing.refusals),
            lag_rows=lag.rows,
            lag_s=None if lag.seconds is None else round(lag.seconds, 3),
            best_auc=best_auc(rows, self._schema.labels[0], self._config.truth),
            crc32=crc32,
            source=self._config.source_name,
        )
        self._growing = None
        return self._folder.add(window, growing.refusals)
