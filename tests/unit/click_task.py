"""A task that needs ids and dense columns, and tables for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

DIM, FEATURES, COLUMNS = 8, 3, 5


@dataclass
class PlainBatch:
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def batch(rows: int, seed: int, columns: int = COLUMNS) -> PlainBatch:
    """Labels are decided by the parity of the first feature's id and the sign of a dense column."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (FEATURES * rows,), generator=generator)
    dense = torch.randn(rows, columns, generator=generator)
    sign = dense[:, 0] > 0 if columns else torch.zeros(rows, dtype=torch.bool)
    kjt = KeyedJaggedTensor(
        [f"f{i}" for i in range(FEATURES)],
        ids,
        lengths=torch.ones(FEATURES * rows, dtype=torch.int32),
    )
    return PlainBatch(dense, kjt, ((ids[:rows] % 2 == 0) ^ sign).float())


def tables(dim: int = DIM) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(20, dim, f"t{i}", feature_names=[f"f{i}"]) for i in range(FEATURES)]
    )
