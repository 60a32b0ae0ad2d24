"""rayrec: a Ray-orchestrated distributed embedding cluster.

The public names below load on first use, so that `rayrec.layout` and `rayrec.planner` work without
torch, and `rayrec.Driver` alone brings in Ray.
"""

from __future__ import annotations

from rayrec.lazy import lazy_names
from rayrec.version import VERSION

__version__ = VERSION

_EXPORTS = {
    "rayrec.driver": (
        "Callback",
        "CheckpointConfig",
        "Driver",
        "EarlyStopping",
        "EvaluationConfig",
        "FailureConfig",
        "OptimizerConfig",
        "ProfileConfig",
        "PublishConfig",
        "RayDataset",
        "Result",
        "RunConfig",
        "ScalingConfig",
        "Task",
    ),
    "rayrec.distributed": (
        "DistributedModelParallel",
        "FusedEmbeddingBagCollection",
        "FusedEmbeddingCollection",
        "fuse_embedding_optimizer",
    ),
    "rayrec.layout": (
        "DataType",
        "EmbeddingBagConfig",
        "EmbeddingConfig",
        "PoolingType",
        "ShardingPlan",
        "Topology",
    ),
    "rayrec.metrics": ("Metric",),
    "rayrec.modules": ("EmbeddingBagCollection", "EmbeddingCollection"),
    "rayrec.optim": ("SGD", "Adagrad", "RowWiseAdagrad"),
    "rayrec.planner": ("EmbeddingShardingPlanner", "ParameterConstraints"),
    "rayrec.sparse": ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)
__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
