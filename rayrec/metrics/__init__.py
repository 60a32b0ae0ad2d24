"""Click and ranking metrics that stream and merge exactly, and the distance from planted truth."""

from rayrec.metrics.binary import STATE_SIZE, BinaryMetrics, BinaryScores
from rayrec.metrics.gauc import Gauc
from rayrec.metrics.metric import Metric, check_mergeable
from rayrec.metrics.ranking import RankingMetrics, RankingScores
from rayrec.metrics.registry import metric_named
from rayrec.metrics.truth import PlantedScores, Regret, regret

__all__ = [
    "STATE_SIZE",
    "BinaryMetrics",
    "BinaryScores",
    "Gauc",
    "Metric",
    "PlantedScores",
    "RankingMetrics",
    "RankingScores",
    "Regret",
    "check_mergeable",
    "metric_named",
    "regret",
]
