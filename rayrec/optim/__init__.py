"""Sparse optimizers, fused into the backward pass of the lookup kernels."""

from rayrec.optim.sparse import SGD, Adagrad, RowWiseAdagrad, SparseOptimizer, sparse_optimizer

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "SparseOptimizer", "sparse_optimizer"]
