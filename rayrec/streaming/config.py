"""Options of a stream: its source, the cut of its windows, late events, and the end of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rayrec.checks import seconds, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.streaming.folder_source import FolderSource, FolderStream
from rayrec.streaming.source import StreamSource

SOURCES: dict[type, type] = {FolderSource: FolderStream}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStop:
    """End of a run on a stream; without any it ends by SIGTERM alone.

    Attributes:
        windows: number of windows that are trained on.
        rows: number of rows that are trained on.
        idle_s: seconds without a new row.
    """

    windows: int | None = None
    rows: int | None = None
    idle_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for what in ("windows", "rows"):
            if getattr(self, what) is not None:
                whole_number(f"StreamStop has {what}", getattr(self, what))
        if self.idle_s is not None:
            seconds("StreamStop has idle_s", self.idle_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """Stream of a run.

    A window is cut at the first of three bounds: its rows, the seconds since its first row came,
    and the event time, where `event_time` and `window_s` are given.

    Attributes:
        folder: a growing folder of Parquet files.
        rows: most rows of a window.
        wait_s: seconds from the first row of a window until it is cut with what there is.
        event_time: column with the event time of each row, a timestamp or a whole number.
        event_unit: unit of an event time that is a number.
        window_s: seconds of event time of a window. It ends before the first row whose event time
            is at or after the next multiple of these seconds.
        late_by_s: an event is late if it is older, by more than this, than the newest event of
            earlier windows.
        late: "train" counts late events and trains on them in the window in which they came; "drop"
            keeps them out.
        most_ahead_s: an event that is further ahead of this machine's clock is trained on and
            counted, but it neither ends a window nor makes others late.
        windows_ahead: windows that are cut before the training comes to them; the source is not
            polled beyond.
        stop: end of the run.
    Raises:
        ConfigError: there is no source or more than one, or the options contradict each other.
    """

    folder: FolderSource | None = None
    rows: int = 100_000
    wait_s: float = 10.0
    event_time: str | None = None
    event_unit: Literal["s", "ms"] = "s"
    window_s: int | None = None
    late_by_s: int = 0
    late: Literal["train", "drop"] = "train"
    most_ahead_s: int = 3600
    windows_ahead: int = 2
    stop: StreamStop = field(default_factory=StreamStop)

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("StreamConfig has rows", self.rows)
        seconds("StreamConfig has wait_s", self.wait_s)
        whole_number("StreamConfig has windows_ahead", self.windows_ahead)
        whole_number("StreamConfig has late_by_s", self.late_by_s, 0)
        whole_number("StreamConfig has most_ahead_s", self.most_ahead_s, 0)
        if self.window_s is not None:
            whole_number("StreamConfig has window_s", self.window_s)
        needs = [
            name
            for name, default in (("window_s", None), ("late_by_s", 0), ("late", "train"))
            if getattr(self, name) != default
        ]
        if needs and self.event_time is None:
            raise ConfigError(
                f"StreamConfig has {needs[0]}={getattr(self, needs[0])!r}, which is about the "
                "event time of rows; give event_time, the name of their column."
            )
        _ = self.source  # checks

    @property
    def source(self) -> FolderSource:
        """The options of the one source."""
        given = [
            getattr(self, name)
            for name in self.__dataclass_fields__
            if type(getattr(self, name)) in SOURCES
        ]
        if len(given) != 1:
            raise ConfigError(
                f"a stream has one source, and {len(given)} are given; say one of "
                f"{', '.join(kind.__name__ for kind in SOURCES)}, such as folder."
            )
        return given[0]

    def open(self) -> StreamSource:
        """Open the source."""
        opened: StreamSource = SOURCES[type(self.source)](self.source)
        return opened
