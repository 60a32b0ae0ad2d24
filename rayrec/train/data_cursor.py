"""`DataCursor`: the data cursor of a run, an epoch and a batch, and the batches from there on.

The pipeline reads batches ahead of the steps, so the place moves with the steps and not with the
reading.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

from rayrec.data import RowDataset, TimeWindow, WindowedDataset
from rayrec.errors import ConfigError
from rayrec.streams import StreamDataset
from rayrec.train.config import RunOptions, TrainData, TrainSpec
from rayrec.train.scoring import binary_labels


class DataCursor:
    """Data cursor of a rank; epoch and batch are the same on every rank.

    Args:
        spec: the run.
        rank, world_size: index of the rank that reads its parts of the batches, and ranks in all.
        pin_memory: files are read into page-locked memory; batches of other datasets are pinned by
            a copy, in `Reader`.
    Attributes:
        epoch: number of finished passes over the data.
        batch: batches done of the current epoch; all of them at its end, until the next step.

    An epoch of a stream is one of its windows, which is opened before its batches are read.
    """

    def __init__(
        self, spec: TrainSpec, rank: int, world_size: int, pin_memory: bool = False
    ) -> None:
        self._spec, self._pin_memory = spec, pin_memory
        self._rank, self._world_size = rank, world_size
        self.epoch, self.batch = 0, 0
        self._per_epoch = 1
        self._is_stream = isinstance(spec.data, StreamDataset)
        self._data = None if isinstance(spec.data, StreamDataset) else spec.data
        # windows in time, by the batch of the epoch with which they begin
        self._windows: dict[int, TimeWindow] = {}
        if isinstance(spec.data, WindowedDataset):
            firsts = spec.data.first_batches(spec.global_batch_size, spec.drop_last)
            for window, first, end in zip(spec.data.windows, firsts, firsts[1:], strict=False):
                if end > first:
                    self._windows[first] = window

    def open(self, window: TimeWindow) -> None:
        """Go to a window of a stream, at its beginning unless the cursor is in it already."""
        if window.start != self.epoch:
            self.epoch, self.batch = window.start, 0
        self._data, self._windows = window.data, {0: window}
        self._per_epoch = window.data.num_batches(
            self._spec.global_batch_size, drop_last=self._spec.drop_last
        )

    @property
    def left(self) -> int:
        """Batches of the current epoch that are not done."""
        return self._per_epoch - self.batch

    def window(self) -> TimeWindow | None:
        """Return the window in time that begins with the next step, or None."""
        return self._windows.get(self.batch)

    def next_step(self, step: int) -> int | None:
        """Return the step after which the next window begins; None where there is none."""
        if self._is_stream:
            return step + self.left
        following = min((first for first in self._windows if first > self.batch), default=None)
        return None if following is None else step + following - self.batch

    def batches(self) -> Generator[Any, None, None]:
        """This rank's batches from here on, epoch after epoch; of a stream, to the window's end.

        Raises:
            ConfigError: there is no data, or too little for one batch.
        """
        spec, data = self._spec, self._data
        if data is None:
            raise ConfigError("this run has no training data.")
        self._per_epoch = data.num_batches(spec.global_batch_size, drop_last=spec.drop_last)
        if self._per_epoch < 1:
            raise ConfigError(
                f"the data has {data.num_rows} rows, which make no batch of "
                f"{spec.global_batch_size} rows with drop_last={spec.drop_last}."
            )
        self._turn()
        return self._read(self.epoch, self.batch)

    def _read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        spec, data = self._spec, self._data
        assert data is not None
        loader: Callable[..., Iterator[Any]] = data.loader
        if isinstance(data, RowDataset):
            # the pipeline has the reading thread
            loader = partial(
                data.loader,
                pin_memory=self._pin_memory,
                binary_labels=binary_labels(spec.tasks, data),
                threaded=False,
            )
        while True:
            yield from loader(
                self._rank,
                self._world_size,
                spec.global_batch_size,
                seed=spec.seed,
                epoch=epoch,
                start_batch=start,
                shuffle=spec.shuffle,
                drop_last=spec.drop_last,
            )
            if self._is_stream:
                return
            epoch, start = epoch + 1, 0

    def advance(self) -> None:
        """Move the cursor by one batch, after a step."""
        self._turn()
        self.batch += 1

    def _turn(self) -> None:
        if self.batch >= self._per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with the options and data that it depends on."""
        meaning = cursor_meaning(self._spec, self._spec.data)
        return {"epoch": self.epoch, "batch": self.batch, **meaning}

    def place_in(self, cursor: Mapping[str, Any], path: str) -> tuple[int, int]:
        """Return epoch and batch of the checkpoint at `path`; new data stay where they are.

        Raises:
            ConfigError: the run's data, batch size or seed differ, so that the place means other
                rows.
        """
        if self._spec.new_data:
            return self.epoch, self.batch
        check_cursor(cursor, self._spec, self._spec.data, path)
        return int(cursor.get("epoch", 0)), int(cursor.get("batch", 0))

    def go_to(self, epoch: int, batch: int) -> None:
        """Go to a place of this very run."""
        self.epoch, self.batch = epoch, batch


def cursor_meaning(run: RunOptions, data: TrainData | None) -> dict[str, Any]:
    """Return the options and data under which an epoch and a batch number mean the same rows.

    The fingerprint of a data set that has none is None.
    """
    fingerprint = getattr(data, "fingerprint", None)
    source = {"source": data.config.source_name} if isinstance(data, StreamDataset) else {}
    return {
        **source,
        "global_batch_size": run.global_batch_size,
        "seed": run.seed,
        "shuffle": run.shuffle,
        "drop_last": run.drop_last,
        "data": None if fingerprint is None else fingerprint(),
    }


def check_cursor(
    cursor: Mapping[str, Any], run: RunOptions, data: TrainData | None, path: str
) -> None:
    """Check that the place in the data of the checkpoint at `path` means the same rows in a run.

    Raises:
        ConfigError: names what differs, with both values and the remedies.
    """
    meaning = cursor_meaning(run, data)
    # a stream has no beginning that a run could go back to
    anew = (
        ""
        if "source" in meaning
        else "say new_data to keep weights and step and begin the data anew; or "
    )
    for what, wanted in meaning.items():
        saved = cursor.get(what)
        # unknown on one side: an older checkpoint, or data without files
        if saved is None or wanted is None or saved == wanted:
            continue
        if what == "source":
            raise ConfigError(
                f"{path} was trained on {saved}, and this run reads {wanted}, where its place in "
                "the stream would mean other rows. Give the source that it was trained on, or "
                "start a new run from its weights with init_from."
            )
        if what == "data":
            raise ConfigError(
                f"{path} was trained on other data: they had the fingerprint {saved}, those "
                f"of this run have {wanted}. Give the data that it was trained on; or {anew}start "
                "a new run from its weights with init_from."
            )
        raise ConfigError(
            f"{path} was trained with {what}={saved}, the run has {wanted}; its place in the data "
            f"would mean other rows. Use {what}={saved}; or {anew}start a new run from its weights "
            "with init_from."
        )
