"""The tasks of this package, picklable values that ranks run: train, evaluate, predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rayrec.data import FileDataset
from rayrec.data.scored import Predicted, ScoredFolder
from rayrec.train.config import TrainSpec
from rayrec.train.loop import RankTrainer
from rayrec.train.outcome import FitOutcome as FitOutcome
from rayrec.train.predictions import PredictionConfig
from rayrec.train.seat import RankContext

Scorer = Callable[[RankTrainer], Mapping[str, float]]


class RowScorer(Protocol):
    """Scores of rows, of a model whose forward gives none."""

    @property
    def outputs(self) -> Sequence[tuple[str, str]]:
        """Name and kind of each column of scores."""

    def __call__(self, trainer: RankTrainer) -> Callable[[Any], Sequence[Tensor]]:
        """Return a function of a batch, which gives the columns; all ranks call both together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitTask:
    """Train as the spec says, then score the model.

    Attributes:
        scorer: gives the scores of the trained model, on every rank alike; None scores
            `spec.eval_data`.
    """

    spec: TrainSpec
    scorer: Scorer | None = None

    def run(self, context: RankContext) -> FitOutcome:
        """Train and score on this rank, together with all ranks."""
        context.mark("ranks connected")
        context.phase("making the model and its tables")
        with RankTrainer(self.spec, context.device, context.phase) as trainer:
            trainer.save_asked, trainer.going_to = context.save_asked, context.going_to
            reads = self.spec.resume_from or self.spec.init_from
            context.phase("reading the checkpoint" if reads else "starting")
            began = trainer.begin(context.report)
            context.at_step(trainer.step)
            context.mark("model and tables made")
            context.report(began)
            first = trainer.step + 1

            def at_step(step: int) -> None:
                context.at_step(step)
                if step == first:
                    context.mark("first step")

            try:
                stopped = trainer.run(context.should_stop, context.report, at_step)
                times = trainer.times()
                for line in trainer.id_lines():
                    context.report(line)
                metrics = {} if stopped else self._scores(trainer, context)
            except Exception as error:
                trainer.hooks.end(error, trainer.step)
                raise
            trainer.hooks.end(None, trainer.step)
            if trainer.hooks.error is not None:
                raise trainer.hooks.error
        return FitOutcome.of(
            trainer,
            metrics or {},
            stopped=stopped or metrics is None,
            times=times,
            profile=trainer.profile,
        )

    def _scores(self, trainer: RankTrainer, context: RankContext) -> dict[str, float] | None:
        """Score the trained model; return None when the evaluation was stopped."""
        context.phase("evaluating")
        if self.scorer is not None:
            return dict(self.scorer(trainer))
        if self.spec.eval_data is None:
            return {}
        return trainer.final_scores(context.should_stop, context.beat)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateTask:
    """Score the evaluation data with the weights of a checkpoint.

    Attributes:
        spec: spec of the run, whose `eval_data` are scored.
        checkpoint: directory of the weights; None scores the untrained model.
        predictions: file for the score of every row, or None.
        scorer: gives the scores, on every rank alike; None scores `spec.eval_data`.
    """

    spec: TrainSpec
    checkpoint: str | None
    predictions: PredictionConfig | None = None
    scorer: Scorer | None = None

    def run(self, context: RankContext) -> dict[str, float] | None:
        """Score on this rank, together with all ranks; return None when it was stopped."""
        assert self.spec.eval_data is not None
        context.phase("making the model and its tables")
        with RankTrainer(self.spec, context.device, context.phase) as trainer:
            if self.checkpoint is not None:
                context.phase("reading the checkpoint")
                trainer.restore(self.checkpoint, weights_only=True)
            context.phase("evaluating")
            if self.scorer is not None:
                return dict(self.scorer(trainer))
            return trainer.evaluate(
                self.spec.eval_data, self.predictions, context.should_stop, context.beat
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictTask:
    """Write the scores of rows by the weights of a checkpoint.

    Attributes:
        spec: spec of the run, whose `eval_data` are scored; they lie in files.
        checkpoint: directory of the weights.
        folder: folder that receives the scores.
        scorer: gives the scores of rows; None takes the model's logits.
    """

    spec: TrainSpec
    checkpoint: str
    folder: ScoredFolder
    scorer: RowScorer | None = None

    def run(self, context: RankContext) -> Predicted | None:
        """Write the scores, together with all ranks; return None when it was stopped."""
        data = self.spec.eval_data
        assert isinstance(data, FileDataset), "the driver has checked the data"
        context.phase("making the model and its tables")
        with RankTrainer(self.spec, context.device, context.phase) as trainer:
            context.phase("reading the checkpoint")
            trainer.restore(self.checkpoint, weights_only=True)
            context.phase("predicting")
            own = (context.should_stop, context.beat)
            if self.scorer is None:
                return trainer.predict(data, self.folder, *own)
            trainer.model.eval()
            with torch.no_grad():
                scores = self.scorer(trainer)
            return trainer.predict(data, self.folder, *own, scores)
