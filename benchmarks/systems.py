"""The systems that the step benchmark runs side by side: each a function that builds a step on this rank.

Every system trains the same tables on the same local batches: forward of all tables, backward of the sum of the outputs, update. A
builder returns a `step(ids, lengths)` to be called by all ranks together. A system whose package is not importable is left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.workload import Workload

Step = Callable[[Tensor, Tensor], None]


def rayrec_step(work: Workload, rank: int, world_size: int, kind: str = "table_wise") -> Step:
    """rayrec's DistributedModelParallel over one collection."""
    from rayrec.distributed import DistributedModelParallel
    from rayrec.layout import EmbeddingBagConfig, Topology
    from rayrec.modules import EmbeddingBagCollection
    from rayrec.optim import RowWiseAdagrad
    from rayrec.planner import EmbeddingShardingPlanner
    from rayrec.sparse import KeyedJaggedTensor

    tables = [EmbeddingBagConfig(n, work.dim, name=f"t{i}", feature_names=[work.keys[i]]) for i, n in enumerate(work.rows)]
    topology = Topology.local(world_size, memory_bytes=16 << 30)
    plan = EmbeddingShardingPlanner(topology, work.batch // world_size, kinds=[kind]).plan(tables)
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables, device="meta"), plan=plan, sparse_optimizer=RowWiseAdagrad(lr=work.lr), seed=0
    )

    def step(ids: Tensor, lengths: Tensor) -> None:
        model(KeyedJaggedTensor(work.keys, ids, lengths=lengths)).values().sum().backward()

    return step


def torchrec_step(work: Workload, rank: int, world_size: int, kind: str = "table_wise") -> Step:
    """TorchRec's DistributedModelParallel over one collection, with its own planner held to `kind`."""
    import logging

    logging.disable(logging.WARNING)
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    class Wrapper(nn.Module):
        def __init__(self, ebc: EmbeddingBagCollection) -> None:
            super().__init__()
            self.ebc = ebc

        def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
            return self.ebc(kjt).values()

    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=work.dim, num_embeddings=n, feature_names=[work.keys[i]])
        for i, n in enumerate(work.rows)
    ]
    model = Wrapper(EmbeddingBagCollection(device=torch.device("meta"), tables=tables))
    fused = {"learning_rate": work.lr, "eps": 1e-8, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    wanted = {t.name: ParameterConstraints(sharding_types=[kind], compute_kernels=["fused"]) for t in tables}
    topology = Topology(world_size=world_size, compute_device="cpu", local_world_size=world_size, hbm_cap=0, ddr_cap=64 << 30)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=work.batch // world_size, constraints=wanted)
    group = dist.group.WORLD
    plan = planner.collective_plan(model, [sharder], group)
    sharded = DistributedModelParallel(
        module=model, env=ShardingEnv.from_process_group(group), device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )

    def step(ids: Tensor, lengths: Tensor) -> None:
        sharded(KeyedJaggedTensor(keys=work.keys, values=ids, lengths=lengths)).sum().backward()

    return step


def plain_step(work: Workload, rank: int, world_size: int) -> Step:
    """torch alone: nn.EmbeddingBag(sparse=True) per table under DDP, with sparse SGD (torch has no row-wise Adagrad)."""
    from torch.nn.parallel import DistributedDataParallel

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(n, work.dim, mode="sum", sparse=True) for n in work.rows)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            local = lengths.numel() // work.tables
            offsets = torch.arange(0, local * work.pooling, work.pooling)
            parts = ids.split(local * work.pooling)
            return torch.cat([bag(part, offsets) for bag, part in zip(self.bags, parts, strict=True)], 1)

    torch.manual_seed(0)
    model = DistributedDataParallel(Bags(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)

    def step(ids: Tensor, lengths: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(ids, lengths).sum().backward()
        optimizer.step()

    return step


def available() -> dict[str, Callable[..., Step]]:
    """The systems that can run here, by name."""
    systems: dict[str, Callable[..., Step]] = {"rayrec": rayrec_step}
    if importlib.util.find_spec("torchrec") is not None:
        systems["torchrec"] = torchrec_step
    systems["plain"] = plain_step
    return systems
