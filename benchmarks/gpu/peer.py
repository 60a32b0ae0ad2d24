"""TorchRec on the same tables and batches, in turns with rayrec, where it is importable."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.checks import Notes, Settings, Skip
from benchmarks.gpu.clicks import batches_of, workload
from benchmarks.gpu.speed import embedding_step
from benchmarks.gpu.timing import Step, host_us, turns_ms
from benchmarks.gpu.world import world_of_one
from benchmarks.workload import Workload


def run(settings: Settings, notes: Notes) -> None:
    """Milliseconds of an embedding step, and microseconds of the host, of both sides."""
    with notes.check("importable") as found:
        if importlib.util.find_spec("torchrec") is None:
            raise Skip("torchrec is not importable")
        import torchrec

        found["version"] = torchrec.__version__
    if notes.checks[-1]["status"] != "pass":
        return
    _set_environment()
    rounds, steps = settings.choose(9, 3, 2), settings.choose(20, 3, 2)
    for pooling in (1, 10):
        work = workload(settings, pooling)
        with notes.check(f"embedding step, {pooling} ids a bag") as found, world_of_one(settings):
            sides = {
                "rayrec": embedding_step(work, settings),
                "torchrec": torchrec_step(work, settings),
            }
            times = turns_ms(sides, settings, rounds, steps)
            found["ms"] = times
            found["times as fast"] = _ratio(times)
    work = workload(settings)
    tiny = Workload(batch=8, dim=work.dim, cap=1000, tables=work.tables)
    with notes.check("host time of an embedding step") as found, world_of_one(settings):
        for name, make in (("rayrec", embedding_step), ("torchrec", torchrec_step)):
            steps = settings.choose(200, 30, 3)
            found[name] = host_us(make(tiny, settings), settings, steps)


def _ratio(times: dict[str, dict[str, float]]) -> float:
    return round(times["torchrec"]["median"] / times["rayrec"]["median"], 3)


def _set_environment() -> None:
    """What TorchRec reads of a launcher's variables."""
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in ranks.items():
        os.environ.setdefault(name, str(value))


class _Values(nn.Module):
    """A collection whose forward is its values."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, kjt: Any) -> Tensor:
        return self.collection(kjt).values()


def torchrec_step(work: Workload, settings: Settings) -> Step:
    """The step of `embedding_step` by TorchRec, its planner held to whole tables."""
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

    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=work.dim, num_embeddings=n, feature_names=[work.keys[i]]
        )
        for i, n in enumerate(work.rows)
    ]
    model = _Values(EmbeddingBagCollection(device=torch.device("meta"), tables=tables))
    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"learning_rate": 0.02, "eps": 1e-8, "optimizer": optimizer}
    )
    kept = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    device = torch.device(settings.device)
    memory = {"hbm_cap": 64 << 30} if settings.on_gpu else {"hbm_cap": 0, "ddr_cap": 64 << 30}
    topology = Topology(world_size=1, compute_device=settings.device, local_world_size=1, **memory)
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=work.batch, constraints={table.name: kept for table in tables}
    )
    group = dist.group.WORLD
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=planner.collective_plan(model, [sharder], group),
        sharders=[sharder],
    )
    batches = [batch.sparse_features.to(device) for batch in batches_of(work, 4)]
    lengths = [kjt.length_per_key() for kjt in batches]

    def step(i: int) -> None:
        kjt = batches[i % 4]
        sharded(
            KeyedJaggedTensor(
                keys=work.keys,
                values=kjt.values(),
                lengths=kjt.lengths(),
                length_per_key=list(lengths[i % 4]),
            )
        ).sum().backward()

    return step
