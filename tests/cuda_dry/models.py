"""A model with collections of every kind, plans and batches for it, and storages of tables."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.layout import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    ShardingPlan,
    Storage,
    Topology,
)
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from rayrec.optim import SparseOptimizer
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor

GPU, CPU = torch.device("cuda"), torch.device("cpu")
KEYS, ROWS, BATCH = ("a", "b", "c", "d"), 40, 6


class Everything(nn.Module):
    """Pooled, shared, mean, weighted and place-weighted tables of two widths, and sequences."""

    def __init__(self, device: str) -> None:
        super().__init__()
        where = torch.device(device)
        pooled = [
            EmbeddingBagConfig(ROWS, 8, name="p0", feature_names=["a"]),
            EmbeddingBagConfig(ROWS, 16, name="p1", feature_names=["b", "c"]),
            EmbeddingBagConfig(ROWS, 8, name="p2", feature_names=["d"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(ROWS, 8, name="p3", feature_names=["a"], pooling=PoolingType.MEAN),
        ]
        self.pooled = EmbeddingBagCollection(pooled, device=where)
        weighted = [EmbeddingBagConfig(ROWS, 8, name="w0", feature_names=["a", "b"])]
        self.weighted = EmbeddingBagCollection(weighted, is_weighted=True, device=where)
        sequences = [
            EmbeddingConfig(ROWS, 8, name=f"s{i}", feature_names=[k]) for i, k in enumerate("bd")
        ]
        self.sequences = EmbeddingCollection(sequences, device=where)
        placed = [EmbeddingBagConfig(ROWS, 8, name="f0", feature_names=["c"])]
        self.placed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(placed, is_weighted=True, device=where),
            PositionWeightedModuleCollection({"c": 9}),
        )
        self.dense = nn.Linear(8 + 2 * 16 + 2 * 8 + 2 * 8 + 8 + 8, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        jagged = self.sequences(kjt)
        bags = [module(kjt).values() for module in (self.pooled, self.weighted, self.placed)]
        longest = torch.stack([jagged[key].to_padded_dense(4).amax(1) for key in "bd"]).sum(0)
        return self.dense(torch.cat([*bags, longest], 1)).squeeze(1)


def batch(seed: int) -> KeyedJaggedTensor:
    rng = random.Random(seed)
    lengths = [rng.randint(0, 4) for _ in range(len(KEYS) * BATCH)]
    values = torch.tensor([rng.randrange(ROWS) for _ in range(sum(lengths))])
    weights = torch.tensor([rng.random() for _ in range(sum(lengths))])
    return KeyedJaggedTensor(list(KEYS), values, weights, torch.tensor(lengths, dtype=torch.int32))


def plan_of(kind: str = "table_wise") -> ShardingPlan:
    return manual_plan(table_configs(Everything("meta")), kind, Topology.local(1))


def build(
    device: torch.device, optimizer: SparseOptimizer, kind: str = "table_wise"
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedModelParallel(
        Everything("meta"), plan=plan_of(kind), sparse_optimizer=optimizer, device=device, seed=0
    )
    return model, torch.optim.SGD([p for _, p in model.dense_parameters()], 0.1)


STORAGES = {
    "device": Storage(),
    "host": Storage("host"),
    "cached": Storage("cached", load_factor=0.5),
}
