"""A DLRM and batches of clicks in memory, for the parts that train a whole model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.checks import Settings
from benchmarks.workload import Workload
from rayrec.data import Batch
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, TableLayout, TablePlacement
from rayrec.models import DLRM, DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import OptimizerConfig

DENSE = 13


def workload(settings: Settings, pooling: int = 1) -> Workload:
    """Criteo-like tables: as many rows as fit a test of speed, not of memory."""
    batch, dim, cap, tables = settings.choose(
        (16384, 128, 250_000, 26), (512, 32, 20_000, 26), (64, 8, 200, 4)
    )
    return Workload(batch=batch, dim=dim, cap=cap, tables=tables, pooling=pooling)


def tables_of(work: Workload) -> list[EmbeddingBagConfig]:
    """One table a feature."""
    return [
        EmbeddingBagConfig(rows, work.dim, name=f"t{i}", feature_names=[work.keys[i]])
        for i, rows in enumerate(work.rows)
    ]


def whole_tables(tables: Sequence[EmbeddingBagConfig]) -> ShardingPlan:
    """All of them on rank 0, uncut."""
    placements = {}
    for table in tables:
        cuts = (0, table.num_embeddings), (0, table.embedding_dim)
        placements[table.name] = TablePlacement(TableLayout(*cuts, ((0,),)))
    return ShardingPlan(world_size=1, tables=placements)


def dlrm(
    work: Workload, settings: Settings, prefetch: bool = False
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """A DLRM on this rank, and Adam for its dense layers, as runs have it."""
    torch.manual_seed(settings.seed)
    tables = tables_of(work)
    over = settings.choose([1024, 1024, 512, 256, 1], [256, 128, 1], [8, 1])
    below = settings.choose([512, 256, work.dim], [128, work.dim], [work.dim])
    module: nn.Module = DLRMTrain(
        DLRM(EmbeddingBagCollection(tables, device="meta"), DENSE, below, over)
    )
    model = DistributedModelParallel(
        module,
        plan=whole_tables(tables),
        sparse_optimizer=RowWiseAdagrad(lr=0.02),
        device=settings.device,
        seed=settings.seed,
        prefetch=prefetch,
    )
    return model, OptimizerConfig(name="adam", lr=1e-3).make_dense(list(model.parameters()))


def batches_of(work: Workload, count: int, seed: int = 0) -> list[Batch]:
    """Batches on the CPU, as the loader makes them."""
    rng = np.random.default_rng(seed)
    found = []
    for ids, lengths in work.batches(0, 1, count, seed):
        rows = work.batch
        kjt = KeyedJaggedTensor(
            work.keys, ids, lengths=lengths, length_per_key=[rows * work.pooling] * work.tables
        )
        found.append(
            Batch(
                dense_features=torch.from_numpy(rng.random((rows, DENSE), np.float32)),
                sparse_features=kjt,
                labels=torch.from_numpy(rng.integers(0, 2, rows).astype(np.float32)),
                global_rows=rows,
            )
        )
    return found
