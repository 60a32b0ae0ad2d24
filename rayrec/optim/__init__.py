"""Sparse optimizers, fused into the backward pass of the lookup kernels, and torch optimizers by
parameter name around them.
"""

from rayrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from rayrec.optim.combined import CombinedOptimizer
from rayrec.optim.fused import FusedOptimizer
from rayrec.optim.in_backward import (
    apply_optimizer_in_backward,
    as_sparse_optimizer,
    in_backward_optimizer_filter,
    optimizer_of,
)
from rayrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from rayrec.optim.rowwise_adagrad import DenseRowWiseAdagrad
from rayrec.optim.warmup import WarmupOptimizer
from rayrec.spec import optimizers as _sparse
from rayrec.spec.optimizers import *  # noqa: F403  # named once, there
from rayrec.spec.schedule import (
    ScheduleConfig,
    WarmupPolicy,
    WarmupStage,
    learning_rate_at,
    schedule,
)

__all__ = [
    "CombinedOptimizer",
    "DenseRowWiseAdagrad",
    "FusedOptimizer",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "ScheduleConfig",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "as_sparse_optimizer",
    "in_backward_optimizer_filter",
    "learning_rate_at",
    "optimizer_of",
    "schedule",
]
__all__ += _sparse.__all__
