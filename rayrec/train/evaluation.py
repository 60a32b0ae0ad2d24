"""Scores of a model on held-out rows, merged over ranks, and the predictions behind them.

Every rank scores its part of each batch without an update. The scores are sums, so one all-reduce
at the end gives every rank the same. Ranks look at their stop flags together every few batches,
because a model with tables on several ranks needs all of them for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from rayrec.data import FileDataset, RowDataset
from rayrec.errors import ConfigError
from rayrec.train.config import Dataset
from rayrec.train.predictions import PredictionConfig, PredictionWriter
from rayrec.train.run_state import LiveRun
from rayrec.train.scoring import Scoring, binary_labels, by_task
from rayrec.train.step import forward
from rayrec.train.window import all_sum

# batches between two looks at the stop flags
STOP_EVERY = 16
# seed of the order of a sample: any number, but always the same
SAMPLE_SEED = 20_011


@torch.no_grad()
def evaluate(
    live: LiveRun,
    data: Dataset,
    predictions: PredictionConfig | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_batch: Callable[[], None] = lambda: None,
    sample: int | None = None,
) -> dict[str, float] | None:
    """Score the model of a run on the rows of `data`; all ranks call it together.

    Args:
        predictions: also write the score of every row; needs a `FileDataset`, and one task that is
            binary.
        should_stop: read every few batches; one rank's True ends the evaluation of all.
        on_batch: called after every batch.
        sample: score the first batches of one fixed random order that have so many rows; None
            scores all rows.
    Returns:
        the same scores on every rank by name, or None when it was stopped.
    Raises:
        InputError: the data hold what the model cannot take.
        ConfigError: predictions are wanted of data that do not lie in files.
        SaveError: the predictions cannot be written.
    """
    model, device, tasks = live.model, live.device, live.spec.tasks
    training = model.training
    model.eval()
    scoring = Scoring(tasks, device, model.module)
    if predictions is not None and tasks and (len(tasks) > 1 or tasks[0].kind != "binary"):
        raise ConfigError(
            "predictions hold the score of one binary task, and this run has "
            f"{', '.join(f'{task.name} ({task.kind})' for task in tasks)}; leave predictions out."
        )
    writer, batches = _open(live, data, predictions, sample)
    dense_dtype = torch.autocast(device.type, live.autocast, enabled=live.autocast is not None)
    try:
        for number, batch in enumerate(batches):
            # all ranks stop at the same batch, or those that go on would wait for the others
            if number % STOP_EVERY == 0 and any_rank(should_stop(), device):
                return None
            batch = on_device(batch, device)
            with dense_dtype:
                _, logits, labels = forward(model, batch)
            outputs = by_task(tasks, logits, labels)
            # A rank whose part is empty still calls the model: its tables answer the other ranks.
            if batch.rows:
                scoring.add(outputs, batch)
            if writer is not None:
                logits, labels = next(iter(outputs.values()))
                writer.add(torch.sigmoid(logits), labels, batch.origin)
            on_batch()
        if writer is not None:
            writer.finish()
            writer = None
    finally:
        if writer is not None:
            writer.abandon()
        model.train(training)
    state = scoring.state()
    # The states are sums over rows, so their sum over ranks is the state of all rows.
    all_sum(state)
    return scoring.scores(state)


def _open(
    live: LiveRun, data: Dataset, predictions: PredictionConfig | None, sample: int | None
) -> tuple[PredictionWriter | None, Iterator[Any]]:
    """Return a writer of the predictions, or None without them, and this rank's batches."""
    loader: Callable[..., Iterator[Any]] = data.loader
    if isinstance(data, RowDataset):
        loader = partial(data.loader, binary_labels=binary_labels(live.spec.tasks, data))
    if sample is not None:
        batches = loader(*live.part, shuffle=True, seed=SAMPLE_SEED)
        return None, _first(batches, -(-sample // live.spec.global_batch_size))
    if predictions is None:
        return None, loader(*live.part, shuffle=False)
    if not isinstance(data, FileDataset):
        raise ConfigError(
            "predictions name files and rows, so they need a ParquetDataset or an ArrowDataset."
        )
    columns = predictions.keys
    batches = loader(*live.part, shuffle=False, ordered=True, with_rows=True, keep_columns=columns)
    files = [file.path for file in data.files]
    return PredictionWriter(predictions, files, live.rank, live.world_size), batches


def _first(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """Yield `number` batches, and then close the loader, whose thread would read on."""
    try:
        yield from islice(batches, number)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def on_device(batch: Any, device: torch.device) -> Any:
    return batch if device.type == "cpu" else batch.pin_memory().to(device, non_blocking=True)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return True if the flag is set on any rank."""
    total = torch.tensor(float(flag), device=device)
    all_sum(total)
    return total.item() > 0
