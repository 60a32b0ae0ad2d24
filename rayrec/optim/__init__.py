"""Sparse optimizers, fused into the backward pass of the lookup kernels, and optimizers keyed by parameter name around them."""

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

__all__ = [
    "LAMB",
    "SGD",
    "SPARSE_OPTIMIZERS",
    "Adagrad",
    "Adam",
    "LarsSGD",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "SparseOptimizer",
    "sparse_optimizer",
]
