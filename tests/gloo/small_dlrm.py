"""A small DLRM over four tables, plans for it, and the parts of its global batches."""

from __future__ import annotations

import torch

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.layout import (
    EmbeddingBagConfig,
    ShardingPlan,
    Topology,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from rayrec.models import DLRM, DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import sparse_optimizer
from rayrec.planner import EmbeddingShardingPlanner
from rayrec.sparse import KeyedJaggedTensor
from tests.worlds import part_of, plan_for

PATH = "model.sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
ROWS, STEPS, GLOBAL = [30, 7, 50, 13], 8, 23  # 23 rows: no number of ranks divides them


class Part:
    """A rank's part of a global batch."""

    def __init__(self, dense, ids, labels, start: int, stop: int) -> None:
        rows = stop - start
        self.dense_features, self.labels, self.rows, self.global_rows = (
            dense[start:stop],
            labels[start:stop],
            rows,
            dense.shape[0],
        )
        keys = [f"f{i}" for i in range(len(ROWS))]
        lengths = torch.ones(len(keys) * rows, dtype=torch.int32)
        self.sparse_features = KeyedJaggedTensor(
            keys, ids[:, start:stop].reshape(-1), lengths=lengths, stride=rows
        )


def parts(step: int, rank: int, world_size: int) -> Part:
    """A rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    rows = 1 if step == STEPS - 1 else GLOBAL  # the last batch leaves ranks without rows
    dense = torch.randn(rows, 5, generator=generator)
    ids = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in ROWS])
    labels = torch.randint(0, 2, (rows,), generator=generator).float()
    return Part(dense, ids, labels, rank * rows // world_size, (rank + 1) * rows // world_size)


def build(device: str = "meta", dense_device: str = "cpu") -> DLRMTrain:
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(n, 8, name=f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate(ROWS)
    ]
    return DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables, device=device),
            5,
            [16, 8],
            [16, 1],
            dense_device=torch.device(dense_device),
        )
    )


def make_plan(kind: str, world_size: int) -> ShardingPlan:
    """The planner's plan for "auto", else tables whole, cut by rows and replicated in turn."""
    tables = table_configs(build())
    if kind == "auto":
        return EmbeddingShardingPlanner(
            Topology.local(world_size, memory_bytes=1 << 30), batch_size=16
        ).plan(tables)
    ranks = range(world_size)
    cycle = [
        lambda t, i: table_wise(t, i % world_size),
        lambda t, i: row_wise(t, ranks),
        lambda t, i: data_parallel(t, ranks),
    ]
    layouts = {t.name: cycle[i % 3](t, i) for i, t in enumerate(tables)}
    return plan_for(world_size, layouts)


def plan_of(world_size: int) -> ShardingPlan:
    """Tables whole, cut by rows and cut by columns in turn; none is replicated."""
    ranks = range(world_size)
    kinds = [
        lambda t, i: table_wise(t, i % world_size),
        lambda t, i: row_wise(t, ranks),
        lambda t, i: column_wise(t, ranks),
    ]
    return plan_for(
        world_size, {t.name: kinds[i % 3](t, i) for i, t in enumerate(table_configs(build()))}
    )


def dmp(
    world_size: int, kind: str = "mixed", prefetch: bool = False
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    optimizer = sparse_optimizer("rowwise_adagrad", 0.05)
    model = DistributedModelParallel(
        build(), plan=make_plan(kind, world_size), sparse_optimizer=optimizer, prefetch=prefetch
    )
    return model, torch.optim.Adam([p for _, p in model.dense_parameters()], lr=1e-2)


def changed() -> torch.nn.Module:
    """The unsharded model with values of its own."""
    source = build("cpu")
    with torch.no_grad():
        for i, p in enumerate(source.parameters()):
            p.add_(i + 1)
    return source


def check_holds(model: DistributedModelParallel, wanted: dict[str, torch.Tensor]) -> None:
    """This rank's rows and the dense layers are those of a whole state_dict."""
    for state in model.shard_states():
        whole = wanted[PATH.format(state.shard.table)]
        assert torch.equal(state.weight, part_of(whole, state.shard))
    for name, p in model.named_parameters():
        assert torch.equal(p, wanted[name])
