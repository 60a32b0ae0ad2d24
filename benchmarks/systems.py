"""The systems that the step benchmark runs side by side: each a function that builds a step on this
rank.

Every system trains the same tables on the same local batches: forward of all tables, backward of
the sum of the outputs, update. A builder returns `step(i)` for batch i, to be called by all ranks
together. A system whose package is not importable is left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.far import put_far
from benchmarks.ranks import ModelStep, Step
from benchmarks.workload import Workload

Batches = Sequence[tuple[Tensor, Tensor]]

KINDS = ("table_wise", "row_wise", "column_wise", "grid", "data_parallel", "mixed")
VARIANTS = ("pipeline", "fp16", "int8", "exchanged", "dynamic", "dynamic_exchanged")
VARIANTS += ("sequence", "sequence_dedup", *(f"sequence_{what}" for what in VARIANTS[3:]))


def rayrec_step(
    work: Workload, rank: int, world_size: int, batches: Batches, variant: str = "table_wise"
) -> Step:
    """rayrec's DistributedModelParallel over one collection: a sharding kind, or a table-wise
    variant; with " far", over `FarExchange`. Ranks that are "exchanged" do not read each other's
    tables in place.
    """
    from rayrec.comm.codec import CommType, QCommsConfig
    from rayrec.distributed import DistributedModelParallel
    from rayrec.layout import DynamicConfig, EmbeddingBagConfig, EmbeddingConfig
    from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
    from rayrec.observe.timer import span
    from rayrec.optim import RowWiseAdagrad
    from rayrec.sparse import KeyedJaggedTensor

    far = variant.endswith(" far")
    variant = variant.removesuffix(" far")
    sequence = variant.startswith("sequence")
    make_table = EmbeddingConfig if sequence else EmbeddingBagConfig
    rule = DynamicConfig() if "dynamic" in variant else None
    tables = [
        make_table(n, work.dim, name=f"t{i}", feature_names=[work.keys[i]], dynamic=rule)
        for i, n in enumerate(work.rows)
    ]
    collection = (
        EmbeddingCollection(tables, device="meta")
        if sequence
        else EmbeddingBagCollection(tables, device="meta")
    )
    precision = CommType(variant) if variant in ("fp16", "int8") else CommType.FP32
    model = DistributedModelParallel(
        _WithLoss(collection) if variant == "pipeline" else collection,
        plan=plan_of(tables, variant if variant in KINDS else "table_wise", work, world_size),
        sparse_optimizer=RowWiseAdagrad(lr=work.lr),
        seed=0,
        qcomms=QCommsConfig(precision, precision),
        prefetch=variant == "pipeline",
        dedup_sequences=variant == "sequence_dedup",
        share_tables="exchanged" not in variant,
    )
    if far:
        put_far(model)

    def kjt_of(i: int) -> KeyedJaggedTensor:
        ids, lengths = batches[i % len(batches)]
        return KeyedJaggedTensor(work.keys, ids, lengths=lengths)

    def sequence_step(i: int) -> None:
        total = torch.cat([jagged.values() for jagged in model(kjt_of(i)).values()]).sum()
        with span(model.timer, "backward"):
            total.backward()

    def step(i: int) -> None:
        total = model(kjt_of(i)).values().sum()
        with span(model.timer, "backward"):
            total.backward()

    if variant == "pipeline":
        from rayrec.train import TrainPipelineSparseDist

        pipeline = TrainPipelineSparseDist(model, None, "cpu")
        stream = (kjt_of(i) for i in count())
        return ModelStep(lambda i: pipeline.progress(stream), model)
    return ModelStep(sequence_step if sequence else step, model)


class _WithLoss(nn.Module):
    """A collection whose forward gives (loss, output), as pipelines want."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, kjt: Any) -> tuple[Tensor, Tensor]:
        values = self.collection(kjt).values()
        return values.sum(), values


def plan_of(tables, kind: str, work: Workload, world_size: int):  # type: ignore[no-untyped-def]
    from rayrec.layout import ShardingPlan, TableLayout, TablePlacement, Topology, even_cuts
    from rayrec.planner import EmbeddingShardingPlanner

    topology = Topology.local(world_size, memory_bytes=16 << 30)
    if kind == "grid":  # row blocks x column blocks, both over all ranks
        layouts = {}
        for t in tables:
            rows, cols = (
                even_cuts(t.num_embeddings, world_size),
                even_cuts(t.embedding_dim, world_size, 4),
            )
            owners = tuple(
                tuple((i + j) % world_size for j in range(len(cols) - 1))
                for i in range(len(rows) - 1)
            )
            layouts[t.name] = TablePlacement(TableLayout(rows, cols, owners))
        return ShardingPlan(world_size=world_size, tables=layouts)
    if kind != "mixed":
        return EmbeddingShardingPlanner(topology, work.batch // world_size, kinds=[kind]).plan(
            tables
        )
    cycle = ("table_wise", "row_wise", "column_wise", "data_parallel")
    parts = {
        k: EmbeddingShardingPlanner(topology, work.batch // world_size, kinds=[k]).plan(tables)
        for k in cycle
    }
    small = {t.name: t.num_embeddings < 2000 for t in tables}
    kinds = {
        t.name: "data_parallel" if small[t.name] else cycle[i % 3] for i, t in enumerate(tables)
    }
    return ShardingPlan(
        world_size=world_size, tables={name: parts[k].tables[name] for name, k in kinds.items()}
    )


def planned_by_torchrec(
    model: nn.Module, sharder_type: Any, work: Workload, world_size: int, kind: str = "table_wise"
) -> Callable[[], Any]:
    """What makes TorchRec's DistributedModelParallel over tables t0, t1 ..., by a plan that its own
    planner has made, held to one kind; row-wise Adagrad in the backward.

    Args:
        sharder_type: of the model's collections.
    """
    import logging

    logging.disable(logging.WARNING)
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv

    sharder = sharder_type(
        fused_params={
            "learning_rate": work.lr,
            "eps": 1e-8,
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
    )
    kernel = "dense" if kind == "data_parallel" else "fused"
    wanted = {
        f"t{i}": ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel])
        for i in range(work.tables)
    }
    topology = Topology(
        world_size=world_size,
        compute_device="cpu",
        local_world_size=world_size,
        hbm_cap=0,
        ddr_cap=64 << 30,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=work.batch // world_size, constraints=wanted
    )
    group = dist.group.WORLD
    plan = planner.collective_plan(model, [sharder], group)
    env = ShardingEnv.from_process_group(group)
    return lambda: DistributedModelParallel(
        module=model, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )


def torchrec_step(
    work: Workload, rank: int, world_size: int, batches: Batches, variant: str = "table_wise"
) -> Step:
    """TorchRec's DistributedModelParallel over one collection."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    sequence = variant == "sequence"

    class Wrapper(nn.Module):
        def __init__(self, collection: nn.Module) -> None:
            super().__init__()
            self.collection = collection

        def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
            output = self.collection(kjt)
            return (
                torch.cat([jagged.values() for jagged in output.values()])
                if sequence
                else output.values()
            )

    make_table = EmbeddingConfig if sequence else EmbeddingBagConfig
    tables = [
        make_table(
            name=f"t{i}", embedding_dim=work.dim, num_embeddings=n, feature_names=[work.keys[i]]
        )
        for i, n in enumerate(work.rows)
    ]
    device = torch.device("meta")
    model = Wrapper(
        EmbeddingCollection(device=device, tables=tables)
        if sequence
        else EmbeddingBagCollection(device=device, tables=tables)
    )
    kind = variant if variant == "data_parallel" else "table_wise"
    sharded = planned_by_torchrec(
        model,
        EmbeddingCollectionSharder if sequence else EmbeddingBagCollectionSharder,
        work,
        world_size,
        kind,
    )()
    dense = (
        torch.optim.Adagrad(sharded.parameters(), lr=work.lr) if kind == "data_parallel" else None
    )

    def step(i: int) -> None:
        ids, lengths = batches[i % len(batches)]
        if dense is not None:
            dense.zero_grad()
        sharded(KeyedJaggedTensor(keys=work.keys, values=ids, lengths=lengths)).sum().backward()
        if dense is not None:
            dense.step()

    return step


def plain_step(work: Workload, rank: int, world_size: int, batches: Batches) -> Step:
    """torch alone: nn.EmbeddingBag(sparse=True) per table under DDP, with sparse SGD (torch has no
    row-wise Adagrad).
    """
    from torch.nn.parallel import DistributedDataParallel

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(
                nn.EmbeddingBag(n, work.dim, mode="sum", sparse=True) for n in work.rows
            )

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            local = lengths.numel() // work.tables
            offsets = torch.arange(0, local * work.pooling, work.pooling)
            parts = ids.split(local * work.pooling)
            return torch.cat(
                [bag(part, offsets) for bag, part in zip(self.bags, parts, strict=True)], 1
            )

    torch.manual_seed(0)
    model = DistributedDataParallel(Bags())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)

    def step(i: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(*batches[i % len(batches)]).sum().backward()
        optimizer.step()

    return step


def build(name: str, work: Workload, rank: int, world_size: int, batches: Batches) -> Step:
    """The step of "rayrec VARIANT", "torchrec VARIANT" or "plain"."""
    system, _, variant = name.partition(" ")
    if system == "plain":
        return plain_step(work, rank, world_size, batches)
    if "dlrm" in variant:
        from benchmarks.dlrm_steps import dlrm_step

        return dlrm_step(work, rank, world_size, batches, variant)
    return (rayrec_step if system == "rayrec" else torchrec_step)(
        work, rank, world_size, batches, variant
    )


def available(names: Sequence[str]) -> list[str]:
    """Those of the named systems that can run here."""
    return [
        name
        for name in names
        if not name.startswith("torchrec") or importlib.util.find_spec("torchrec") is not None
    ]
