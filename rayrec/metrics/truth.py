"""Scores of the best possible model on planted data, and the distance of a model from them.

Synthetic data states the scores of its own true probabilities on the very rows of its evaluation
set (`truth.json`), and of parts of them, such as days. Regret is the distance of a model from that:
0 is perfect, and no model trained on other rows can be better except by luck of the sample.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.errors import ConfigError
from rayrec.metrics.binary import BinaryScores


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedScores:
    """Scores of the true probabilities on the evaluation rows.

    Attributes:
        rows, base_rate: size of the evaluation set, and its share of clicks.
        bayes_auc, bayes_logloss, bayes_ne: scores of the true click probabilities.
        shuffled_labels: labels were shuffled: the true scores are those of chance.
        where: filter of these rows; None of all.
        parts: the same of parts of the rows.
    """

    rows: int
    base_rate: float
    bayes_auc: float
    bayes_logloss: float
    bayes_ne: float
    shuffled_labels: bool = False
    where: str | None = None
    parts: tuple[PlantedScores, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> PlantedScores:
        """Read a truth.json.

        Raises:
            ConfigError: the file cannot be read, lacks a field, or holds one of another type.
        """
        try:
            return cls._of(json.loads(Path(path).read_text()), path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"cannot read {path} as the truth of a data set: {error!r}. Write the data set "
                "again."
            ) from error

    @classmethod
    def _of(cls, raw: dict[str, Any], path: str | Path) -> PlantedScores:
        fields = {name: raw[name] for name in cls.__slots__ if name not in ("where", "parts")}
        fields["where"] = raw.get("where")
        kinds = {"rows": (int,), "shuffled_labels": (bool,), "where": (str, type(None))}
        for name, value in fields.items():
            if type(value) not in (taken := kinds.get(name, (int, float))):
                words = " or ".join(kind.__name__ for kind in taken)
                raise ConfigError(
                    f"{path} has {name}={value!r}; it must be of type {words}. Write the data set "
                    "again."
                )
        return cls(**fields, parts=tuple(cls._of(part, path) for part in raw.get("parts", ())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """Distance from the best possible scores; positive is worse."""

    auc: float
    ne: float


def regret(scores: BinaryScores, truth: PlantedScores) -> Regret:
    """Distance of scores on the evaluation rows from those of the true probabilities.

    Raises:
        ConfigError: the scores are of another number of rows than the truth.
    """
    if scores.rows != truth.rows:
        raise ConfigError(
            f"the scores are of {scores.rows} rows, the truth of {truth.rows}; evaluate all rows "
            "of the evaluation set once."
        )
    return Regret(auc=truth.bayes_auc - scores.auc, ne=scores.ne - truth.bayes_ne)
