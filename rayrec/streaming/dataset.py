"""`StreamDataset`: the windows of a stream as data to train on; a window is an epoch of its own.

Place k, b of a run's data cursor is batch b of window k, so checkpoints, sync points and changes of
the number of ranks carry the place in a stream as they carry any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from rayrec.checks import is_uri
from rayrec.data.batch import Batch
from rayrec.data.files import ArrowDataset
from rayrec.data.listing import DataFile
from rayrec.data.order import count_batches
from rayrec.data.readers import FileReader
from rayrec.data.rows import RowDataset
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.streaming.config import StreamConfig
from rayrec.streaming.window_log import WindowLog


class StreamDataset(RowDataset):
    """Windows of a stream, which are cut while the run trains.

    Args:
        schema: what the columns mean.
        config: the source and the cut of the windows.
        folder: local folder of the windows, in the folder of the run.
        num_streams, shuffle_rows: see `RowDataset`.
    Raises:
        ConfigError: the folder is a URI.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        config: StreamConfig,
        folder: str,
        *,
        num_streams: int = 8,
        shuffle_rows: int = 8192,
    ) -> None:
        if is_uri(folder):
            raise ConfigError(
                f"the windows of a stream lie in a local folder that all hosts see, and the run's "
                f"is {folder!r}; give a local storage_path."
            )
        self.schema, self.config, self.log = schema, config, WindowLog(folder)
        self.path, self.files = config.open().name, ()
        self.num_streams, self.shuffle_rows = num_streams, shuffle_rows
        self.order()  # checks num_streams and shuffle_rows

    def window(self, number: int) -> ArrowDataset:
        """Return the rows of a window that is cut.

        Raises:
            InputError: it is not there, or no longer.
        """
        record = self.log.read(number)
        return ArrowDataset(
            str(self.log.path(record)),
            self.schema,
            num_streams=self.num_streams,
            shuffle_rows=self.shuffle_rows,
        )

    def batches_of(self, number: int, global_batch_size: int) -> int:
        """Return the number of global batches of a window that is cut."""
        return count_batches(self.log.read(number).rows, global_batch_size, False)

    def fingerprint(self) -> str:
        """Return a short hash of all that the order of samples in a window depends on.

        The windows themselves are facts in the run's folder, so the options of their cut may
        change.
        """
        facts = repr([self.path, self.num_streams, self.shuffle_rows])
        return hashlib.sha256(facts.encode()).hexdigest()[:32]

    def loader(  # type: ignore[override]
        self,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
        seed: int = 0,
        epoch: int = 0,
        start_batch: int = 0,
        **options: Any,
    ) -> Iterator[Batch]:
        """Yield one rank's parts of the global batches of window `epoch`.

        Args:
            options: see `RowDataset.loader`.
        """
        return self.window(epoch).loader(
            rank, num_ranks, global_batch_size, seed, epoch, start_batch, **options
        )

    def open(self, file: DataFile) -> FileReader:
        """Raise InputError; files are opened by the windows."""
        raise self.broken(file.path, OSError("a stream has windows"))

    def broken(self, path: str, error: Exception) -> InputError:
        """Return the error for a file of the stream that cannot be read."""
        return InputError(f"cannot read {path!r} of {self.path}: {error}.")
