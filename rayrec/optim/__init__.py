"""Sparse optimizers, fused into the backward pass of the lookup kernels, and torch optimizers by
parameter name around them.
"""

from rayrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from rayrec.optim.fused import FusedOptimizer
from rayrec.optim.in_backward import apply_optimizer_in_backward, as_sparse_optimizer, optimizer_of
from rayrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)
from rayrec.optim.rowwise_adagrad import DenseRowWiseAdagrad
from rayrec.optim.sparse import (
    LAMB,
    SGD,
    SPARSE_OPTIMIZERS,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    SparseOptimizer,
    sparse_optimizer,
)
from rayrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage, learning_rate_at

__all__ = [
    "LAMB",
    "SGD",
    "SPARSE_OPTIMIZERS",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "DenseRowWiseAdagrad",
    "FusedOptimizer",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "SparseOptimizer",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "as_sparse_optimizer",
    "learning_rate_at",
    "optimizer_of",
    "sparse_optimizer",
]
