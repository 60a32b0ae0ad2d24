"""`Place`: where a run is in its data, as epoch and batch, and the batches from there on.

The pipeline reads batches ahead of the steps, so the place moves with the steps and not with the reading.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

from rayrec.data import FileDataset
from rayrec.errors import ConfigError
from rayrec.train.config import TrainSpec


class Place:
    """A rank's place in the data of a run; epoch and batch are the same on every rank.

    Args:
        spec: the run.
        rank, world_size: whose parts of the batches are read.
        pin_memory: files are read into page-locked memory; batches of other datasets are pinned by a copy, in `Reader`.
    Attributes:
        epoch: passes over the data that are behind.
        batch: batches done of the current one; all of them at its end, until the next step.
    """

    def __init__(self, spec: TrainSpec, rank: int, world_size: int, pin_memory: bool = False) -> None:
        self._spec, self._rank, self._world_size, self._pin_memory = spec, rank, world_size, pin_memory
        self.epoch, self.batch = 0, 0
        self._per_epoch = 1

    def batches(self) -> Generator[Any, None, None]:
        """This rank's batches from here on, epoch after epoch.

        Raises:
            ConfigError: there is no data, or too little for one batch.
        """
        spec, data = self._spec, self._spec.data
        if data is None:
            raise ConfigError("this run has no training data.")
        self._per_epoch = data.num_batches(spec.global_batch_size, drop_last=spec.drop_last)
        if self._per_epoch < 1:
            raise ConfigError(
                f"the data has {data.num_rows} rows, which make no batch of {spec.global_batch_size} rows with drop_last={spec.drop_last}."
            )
        self._turn()
        return self._read(self.epoch, self.batch)

    def _read(self, epoch: int, start: int) -> Generator[Any, None, None]:
        spec, data = self._spec, self._spec.data
        assert data is not None
        loader: Callable[..., Iterator[Any]] = data.loader
        if self._pin_memory and isinstance(data, FileDataset):
            loader = partial(data.loader, pin_memory=True)
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
            epoch, start = epoch + 1, 0

    def advance(self) -> None:
        """A step is done."""
        self._turn()
        self.batch += 1

    def _turn(self) -> None:
        if self.batch >= self._per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0

    def cursor(self) -> dict[str, int]:
        """For a checkpoint."""
        spec = self._spec
        return {"epoch": self.epoch, "batch": self.batch, "global_batch_size": spec.global_batch_size, "seed": spec.seed}

    def restore(self, cursor: Mapping[str, Any], path: str) -> None:
        """Go to the place that the checkpoint at `path` was saved at.

        Raises:
            ConfigError: the run's batch size or seed differ, so that it means nothing.
        """
        for what, wanted in (("global_batch_size", self._spec.global_batch_size), ("seed", self._spec.seed)):
            if cursor.get(what, wanted) != wanted:
                raise ConfigError(
                    f"{path} was trained with {what}={cursor[what]}, the run has {wanted}; its place in the data would mean other rows. "
                    f"Use {what}={cursor[what]}."
                )
        self.epoch, self.batch = int(cursor.get("epoch", 0)), int(cursor.get("batch", 0))
