"""`ScoringRank`: a rank that scores rows by its sharded model, while it trains or without."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rayrec.data import FileDataset
from rayrec.data.scored import Predicted, ScoredFolder
from rayrec.distributed import DistributedModelParallel
from rayrec.train.bulk import predict
from rayrec.train.config import Dataset, TrainSpec
from rayrec.train.evaluation import BatchPart, evaluate
from rayrec.train.predictions import PredictionConfig


class ScoringRank:
    """One rank's scores; all ranks call the same methods together.

    Attributes:
        spec: the run.
        device: device of this rank.
        rank, world_size: index of this rank, and number of ranks.
        model: the sharded model.
    """

    spec: TrainSpec
    device: torch.device
    rank: int
    world_size: int
    model: DistributedModelParallel

    def evaluate(
        self,
        data: Dataset,
        predictions: PredictionConfig | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_batch: Callable[[], None] = lambda: None,
        sample: int | None = None,
    ) -> dict[str, float] | None:
        """Score the model on the rows of `data`; see `rayrec.train.evaluation.evaluate`."""
        return evaluate(
            self.model,
            data,
            BatchPart(self.rank, self.world_size, self.spec.global_batch_size),
            self.device,
            predictions,
            should_stop,
            on_batch,
            tasks=self.spec.tasks,
            sample=sample,
            autocast=self._autocast,
        )

    def predict(
        self,
        data: FileDataset,
        folder: ScoredFolder,
        should_stop: Callable[[], bool] = lambda: False,
        on_batch: Callable[[], None] = lambda: None,
    ) -> Predicted | None:
        """Write the model's scores of the rows of `data`; see `rayrec.train.bulk.predict`."""
        return predict(
            self.model,
            data,
            BatchPart(self.rank, self.world_size, self.spec.global_batch_size),
            self.device,
            folder,
            should_stop,
            on_batch,
            tasks=self.spec.tasks,
            autocast=self._autocast,
        )

    @property
    def _autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.spec.dense_dtype == "bfloat16" else None
