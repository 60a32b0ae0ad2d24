"""Scores of a model on held-out rows, merged over ranks, and the predictions behind them.

Every rank scores its part of each batch without an update. The scores are sums, so one all-reduce
at the end gives every rank the same. Ranks look at their stop flags together every few batches,
because a model with tables on several ranks needs all of them for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from rayrec.data import FileDataset
from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.metrics import BinaryMetrics, BinaryScores
from rayrec.train.config import Dataset
from rayrec.train.predictions import PredictionConfig, PredictionWriter
from rayrec.train.step import forward
from rayrec.train.window import all_sum

# batches between two looks at the stop flags
STOP_EVERY = 16


class Part(NamedTuple):
    """Which part of each batch a rank scores."""

    rank: int
    world_size: int
    global_batch_size: int


@torch.no_grad()
def evaluate(
    model: DistributedModelParallel,
    data: Dataset,
    part: Part,
    device: torch.device,
    predictions: PredictionConfig | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_batch: Callable[[], None] = lambda: None,
) -> BinaryScores | None:
    """Score a model on all rows of `data`; all ranks call it together.

    Args:
        model: forward(batch) -> (loss, (loss, logits, labels)).
        part: this rank's part of the data.
        predictions: also write the score of every row; needs a `FileDataset`.
        should_stop: read every few batches; one rank's True ends the evaluation of all.
        on_batch: called after every batch.
    Returns:
        the same scores on every rank, or None when it was stopped.
    Raises:
        InputError: the data hold what the model cannot take.
        ConfigError: predictions are wanted of data that do not lie in files.
        SaveError: the predictions cannot be written.
    """
    training = model.training
    model.eval()
    metrics = BinaryMetrics(device)
    writer, batches = _open(data, part, predictions)
    try:
        for number, batch in enumerate(batches):
            # all ranks stop at the same batch, or those that go on would wait for the others
            if number % STOP_EVERY == 0 and _any(should_stop(), device):
                return None
            _, logits, labels = forward(model, _on_device(batch, device))
            # A rank whose part is empty still calls the model: its tables answer the other ranks.
            if batch.rows:
                metrics.update(logits, labels)
            if writer is not None:
                writer.add(torch.sigmoid(logits), labels, batch.origin)
            on_batch()
        if writer is not None:
            writer.finish()
            writer = None
    finally:
        if writer is not None:
            writer.abandon()
        model.train(training)
    state = metrics.state()
    # The states are sums over rows, so their sum over ranks is the state of all rows.
    all_sum(state)
    return BinaryMetrics.from_state(state).compute()


def _open(
    data: Dataset, part: Part, predictions: PredictionConfig | None
) -> tuple[PredictionWriter | None, Iterator[Any]]:
    """What writes the predictions, if they are wanted, and this rank's batches."""
    if not isinstance(data, FileDataset):
        if predictions is not None:
            raise ConfigError(
                "predictions name files and rows, so they need a ParquetDataset or an ArrowDataset."
            )
        return None, data.loader(*part, shuffle=False)
    if predictions is None:
        return None, data.loader(*part, shuffle=False, binary_labels=True)
    files = [file.path for file in data.files]
    batches = data.loader(
        *part,
        shuffle=False,
        ordered=True,
        with_rows=True,
        keep_columns=predictions.keys,
        binary_labels=True,
    )
    return PredictionWriter(predictions, files, part.rank, part.world_size), batches


def _on_device(batch: Any, device: torch.device) -> Any:
    return batch if device.type == "cpu" else batch.pin_memory().to(device, non_blocking=True)


def _any(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank."""
    total = torch.tensor(float(flag), device=device)
    all_sum(total)
    return total.item() > 0
