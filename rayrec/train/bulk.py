"""Predictions of a sharded model into a folder of files, in the order of the data.

Every rank scores its part of each batch of rows in file order, as an evaluation with predictions
does. Rank 0 gathers the parts, which lie side by side in the batch, and cuts them into files of
equal numbers of rows, whatever the ranks are. Labels are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from rayrec.comm import plain
from rayrec.data import FileDataset
from rayrec.data.scored import PART_ROWS, Predicted, ScoredFolder, part_name
from rayrec.data.scored_files import PartWriter, WholeFolder, scored_rows
from rayrec.distributed import DistributedModelParallel
from rayrec.spec.task import Task
from rayrec.train.evaluation import STOP_EVERY, any_rank, on_device
from rayrec.train.run_state import LiveRun
from rayrec.train.scoring import ONE_BINARY, by_task
from rayrec.train.step import forward


def outputs_of(tasks: Sequence[Task]) -> list[tuple[str, str]]:
    """Return name and kind of every output of a run; a single task has no name."""
    tasks = tasks or ONE_BINARY
    return [(task.name if len(tasks) > 1 else "", task.kind) for task in tasks]


@torch.no_grad()
def predict(
    live: LiveRun,
    data: FileDataset,
    folder: ScoredFolder,
    should_stop: Callable[[], bool] = lambda: False,
    on_batch: Callable[[], None] = lambda: None,
    scores: Callable[[Any], Sequence[Tensor]] | None = None,
) -> Predicted | None:
    """Write a run's scores of all rows of `data`; all ranks call it together.

    Args:
        data: rows to score, without labels.
        folder: folder that receives the scores; rank 0 writes.
        should_stop: read every few batches; one rank's True ends it for all.
        on_batch: called after every batch.
        scores: (batch) -> the columns of its rows; None takes the logits of the model.
    Returns:
        a summary of the files, the same on every rank; None when it was stopped.
    Raises:
        InputError: the data hold what the model cannot take.
        ConfigError: the model gives no logits of a task.
        SaveError: the files cannot be written.
    """
    model, device = live.model, live.device
    training = model.training
    model.eval()
    parts = -(-data.num_rows // PART_ROWS)
    columns = tuple(folder.columns.names)
    batches = data.loader(
        *live.part, shuffle=False, ordered=True, with_rows=True, keep_columns=columns
    )
    dense_dtype = torch.autocast(device.type, live.autocast, enabled=live.autocast is not None)
    own = scores or partial(_of_logits, model, live.spec.tasks)
    writer = _Writer(folder, parts) if live.rank == 0 else None
    try:
        for number, batch in enumerate(batches):
            # all ranks stop at the same batch, or those that go on would wait for the others
            if number % STOP_EVERY == 0 and any_rank(should_stop(), device):
                return None
            # A rank whose part is empty still calls the model: its tables answer the other ranks.
            with dense_dtype:
                found = own(on_device(batch, device))
            mine, origin = None, batch.origin
            if batch.rows:
                assert origin is not None, "the loader was asked for the rows"
                kept = [] if origin.columns is None else [origin.columns]
                mine = scored_rows(folder, found, kept)
            # Ranks without rows of a batch send None, since the gather is a collective.
            everyone = plain.gather(mine) if live.world_size > 1 else [mine]
            if writer is not None:
                for rows in everyone:
                    if rows is not None:
                        writer.add(rows)
            on_batch()
        if writer is not None:
            writer.finish()
            writer = None
    finally:
        if writer is not None:
            writer.abandon()
        batches.close()
        model.train(training)
    return Predicted(path=folder.path, rows=data.num_rows, parts=parts)


def _of_logits(
    model: DistributedModelParallel, tasks: Sequence[Task], batch: Any
) -> Sequence[Tensor]:
    """Return the predictions of a batch, one tensor for each task; none of a batch of no rows."""
    from rayrec.serve.scorer import probabilities

    _, logits, labels = forward(model, batch)
    if not batch.rows:
        return []
    outputs = zip(outputs_of(tasks), by_task(tasks, logits, labels).values(), strict=True)
    return [probabilities(kind, own) for (_, kind), (own, _) in outputs]


class _Writer:
    """Cuts rows into `parts` files of `PART_ROWS` rows."""

    def __init__(self, folder: ScoredFolder, parts: int) -> None:
        self._whole, self._parts = WholeFolder(folder.path), parts
        self._number = 0
        self._file = self._next()

    def _next(self) -> PartWriter:
        return PartWriter(self._whole.hidden / part_name(self._number, self._parts))

    def add(self, rows: pa.Table) -> None:
        """Append some rows."""
        while rows.num_rows:
            if self._file.rows == PART_ROWS:
                self._file.close()
                self._number += 1
                self._file = self._next()
            fits = PART_ROWS - self._file.rows
            self._file.add(rows.slice(0, fits))
            rows = rows.slice(fits)

    def finish(self) -> None:
        """Write what is left, and give the folder its name."""
        self._file.close()
        self._whole.publish()

    def abandon(self) -> None:
        """Remove all that was written."""
        self._file.abandon()
        self._whole.abandon()
