"""Options for evaluations during training and for early stopping.

Plain data that every rank is given alike. Everything is checked when it is made, so that a mistake
costs no cluster start. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from rayrec.checks import whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.train.every import Every

# scores of which a smaller value is better, by the part of their name before "@"
LOWER = ("ne", "logloss", "cross_entropy", "mse", "rmse", "mae", "loss")
HIGHER = ("auc", "gauc", "accuracy", "recall", "ndcg")


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopping:
    """Early stopping of a run whose score no longer gets better.

    Attributes:
        patience: number of evaluations in a row without a better score that ends the run.
        min_delta: a score counts as better when it is better by more than this.
    """

    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("EarlyStopping has patience", self.patience)
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(
                f"EarlyStopping(min_delta={self.min_delta}): it must be finite, and zero or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Schedule of evaluations during training, and use of their scores.

    Attributes:
        every_n_steps: score after every so many global steps.
        every_s: score when so many seconds of training have gone by since the last time, at the end
            of a window. The moment depends on the machine, so early stopping needs every_n_steps.
        rows: score a fixed random sample of so many rows, rounded up to whole batches; None scores
            all. The evaluation after training is of all rows in any case; it is compared with those
            before it where they are, too.
        score: the name of the score by which evaluations are compared: "auc", or "click/auc" of a
            task. `keep_best` and `early_stopping` need it.
        mode: "max" if a larger score is better, "min" if a smaller one; None knows usual names.
        keep_best: save a checkpoint whenever the score is the best so far, and never prune it.
        early_stopping: patience and margin of early stopping; None trains to the end.
    Raises:
        ConfigError: the options contradict each other.
    """

    every_n_steps: int | None = None
    every_s: float | None = None
    rows: int | None = None
    score: str | None = None
    mode: Literal["max", "min"] | None = None
    keep_best: bool = False
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.every.check("EvaluationConfig", needed=True)
        if self.rows is not None:
            whole_number("EvaluationConfig has rows", self.rows)
        follows = "early_stopping" if self.early_stopping else "keep_best" * self.keep_best
        if follows and self.score is None:
            raise ConfigError(
                f"EvaluationConfig has {follows} and no score to compare evaluations by; give "
                'score="auc" or another one.'
            )
        if self.early_stopping and self.every_s is not None:
            raise ConfigError(
                "EvaluationConfig has early_stopping and every_s: when a run stops would depend on "
                "the speed of the machine. Give every_n_steps."
            )
        if self.score is not None:
            _ = self.larger_is_better

    @property
    def every(self) -> Every:
        """How often a run evaluates on the way."""
        return Every(self.every_n_steps, self.every_s)

    @property
    def larger_is_better(self) -> bool:
        """True if a larger score is the better one.

        Raises:
            ConfigError: the name does not tell, and there is no mode.
        """
        if self.mode is not None:
            return self.mode == "max"
        kind = (self.score or "").rpartition("/")[2].partition("@")[0]
        if kind not in LOWER and kind not in HIGHER:
            raise ConfigError(
                f"EvaluationConfig has score={self.score!r}: whether a larger one is better is not "
                'known. Give mode="max" or mode="min".'
            )
        return kind in HIGHER


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Best evaluation of a run, and the number of evaluations since; every checkpoint carries it.

    Attributes:
        step, value: step and score of the best evaluation; None before the first.
        without: number of evaluations since then.
        scored: the step of the newest evaluation; None before the first.
    """

    step: int | None = None
    value: float | None = None
    without: int = 0
    scored: int | None = None

    def after(self, step: int, value: float, config: EvaluationConfig) -> Best:
        """Return the best after another evaluation; a value of nan is never better."""
        margin = config.early_stopping.min_delta if config.early_stopping else 0.0
        gain = -math.inf if math.isnan(value) else math.inf
        if self.value is not None and gain > 0:
            gain = value - self.value if config.larger_is_better else self.value - value
        if gain > margin:
            return Best(step=step, value=value, scored=step)
        return replace(self, without=self.without + 1, scored=step)
