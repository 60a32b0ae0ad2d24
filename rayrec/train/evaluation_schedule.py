"""Evaluations during training: when one is due, which is the best, and when to stop.

Every rank decides alike, since all see the same merged scores and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rayrec.errors import ConfigError
from rayrec.train.config import TrainSpec
from rayrec.train.events import Evaluation
from rayrec.train.every import Every
from rayrec.train.shaping import Best


class EvaluationSchedule:
    """Evaluations during training, as a run's `EvaluationConfig` schedules them.

    Attributes:
        best: the best evaluation so far; checkpoints carry it.
        last: the newest evaluation, or None.
        early: reason of early stopping, or "".
        rows: number of rows of the sample; None for all rows.
        keeps_best: the weights of the best evaluation are saved.
    """

    def __init__(self, spec: TrainSpec) -> None:
        config = spec.evaluation
        self._config, self._steps = config, spec.steps
        self._every = Every() if config is None else config.every
        self.rows = None if config is None else config.rows
        self.keeps_best = config is not None and config.keep_best
        self.best, self.early = Best(), ""
        self.last: Evaluation | None = None
        self._seconds = 0.0

    def resume(self, best: Best) -> None:
        """Restore the best evaluation from a checkpoint."""
        self.best, self.early = best, ""
        self._look_at_patience()

    def next_step(self, step: int) -> int | None:
        """Return the next step at which an evaluation is due; None where seconds decide."""
        return self._every.next_step(step)

    def missed(self, step: int) -> bool:
        """Return True if a run was stopped at a step whose evaluation is due and not made."""
        if not step or self.best.scored == step:
            return False
        return self._is_last(step) or self._every.due(step)

    def _is_last(self, step: int) -> bool:
        """Return True at the run's last step, if its evaluation can be compared with earlier ones.

        It is made before the last checkpoint, which then tells of it and may hold the best model.
        A sample is not compared with all rows.
        """
        config = self._config
        compares = config is not None and config.score is not None and self.rows is None
        return compares and step == self._steps

    def due(self, step: int, seconds: float) -> bool:
        """Return True if an evaluation is due at the end of a window of `seconds`."""
        if self._is_last(step):
            return True
        self._seconds += seconds
        return self._every.due(step, self._seconds)

    def judge(self, step: int, scores: Mapping[str, float], seconds: float) -> Evaluation:
        """Compare new scores with the best.

        Raises:
            ConfigError: there is no score of the name to compare by.
        """
        config = self._config
        assert config is not None
        self._seconds, better = 0.0, False
        self.best = replace(self.best, scored=step)
        if config.score is not None:
            if config.score not in scores:
                raise ConfigError(
                    f"EvaluationConfig has score={config.score!r}; the scores of this run are "
                    f"{', '.join(sorted(scores))}."
                )
            self.best = self.best.after(step, scores[config.score], config)
            better = self.best.step == step
        if step != self._steps:
            self._look_at_patience()
        self.last = Evaluation(
            step=step, scores=scores, rows=rows_of(scores), seconds=seconds, best=better
        )
        return self.last

    def _look_at_patience(self) -> None:
        config = self._config
        if config is None or config.early_stopping is None:
            return
        if self.best.without < config.early_stopping.patience:
            return
        value = "none" if self.best.value is None else f"{self.best.value:.6g}"
        self.early = (
            f"{config.score} was not better in {self.best.without} evaluations; the best "
            f"was {value} at step {self.best.step}"
        )

    def whole(self, step: int) -> Evaluation | None:
        """Return the evaluation of all rows at this very step, or None."""
        last = self.last
        return last if last is not None and last.step == step and self.rows is None else None


def rows_of(scores: Mapping[str, float]) -> int:
    """Return the number of rows that were scored, which every task has."""
    return int(next((v for name, v in scores.items() if name.rpartition("/")[2] == "rows"), 0))
