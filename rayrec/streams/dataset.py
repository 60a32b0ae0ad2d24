"""`StreamDataset`: the training data of a run that is fed by a stream."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from rayrec.data.files import ArrowDataset, FileDataset, ParquetDataset
from rayrec.data.rows import RowDataset
from rayrec.errors import ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.storage import resolve
from rayrec.streams.config import StreamConfig
from rayrec.streams.kept import ARROW, StreamWindow, WindowFolder, check_window

STREAM_SCHEMA = "stream_schema"  # among the extras of checkpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamDataset:
    """Rows of a stream, window after window; an epoch of the run is a window.

    Attributes:
        config: the source, and where windows end.
        schema: what the columns mean.
        num_streams: parts of a window of which every batch takes rows in turn.
    Raises:
        ConfigError: windows end by event times, and no column has them; or there is a column of
            true logits, and there are several labels.
    """

    config: StreamConfig
    schema: FeatureSchema
    num_streams: int = 8

    def __post_init__(self) -> None:
        if self.config.event_seconds is not None and not (self.config.time or self.schema.time):
            raise ConfigError(
                f"StreamConfig has event_seconds={self.config.event_seconds}, and no column has "
                "the time of events; give time, the name of the column."
            )
        if self.config.truth is not None:
            self.schema.one_label("a stream with data.stream.truth")

    def window(self, run_path: str, window: StreamWindow) -> FileDataset:
        """Return the rows of a window that has been cut.

        Raises:
            InputError: they are gone or damaged.
        """
        path = f"{WindowFolder(run_path).path}/{window.file}"
        is_arrow = window.file.endswith(ARROW)
        if is_arrow or window.crc32 is not None:
            check_window(resolve(path)[1], window.crc32)
        kind = ArrowDataset if is_arrow else ParquetDataset
        return kind(path, self.schema, num_streams=self.num_streams)

    def whole_columns(self) -> frozenset[str]:
        """Return the columns of ids and of times."""
        time = self.config.time or self.schema.time
        ids = [feature.source for feature in self.schema.features]
        return frozenset([*ids, *self.schema.groups, *([] if time is None else [time])])

    def extras(self) -> dict[str, str]:
        """Return what a checkpoint says of the columns of windows, so that keys can be forgotten
        whatever the model is.
        """
        tables = tuple(replace(table, init_fn=None) for table in self.schema.tables)
        return {STREAM_SCHEMA: replace(self.schema, tables=tables).to_json()}

    def fingerprint(self) -> str:
        """A short hash of what a place in the stream depends on, beside the windows of the run."""
        parts = ["stream", self.config.source_name, self.num_streams]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def schema_of(data: object) -> FeatureSchema | None:
    """Return the schema of data, if they have one."""
    return data.schema if isinstance(data, RowDataset | StreamDataset) else None
