"""The cases that parts compare, their sharded models, and what is compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checks import Settings, assert_close
from benchmarks.gpu.reference import Case, Collection, Model, Reference, tolerance
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    ShardingPlan,
    Storage,
    TableLayout,
    TablePlacement,
    even_cuts,
)
from rayrec.optim import SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor


def bags(name: str, rows: int, width: int, features: str, **how: Any) -> EmbeddingBagConfig:
    """A pooled table; features are single letters."""
    return EmbeddingBagConfig(rows, width, name=name, feature_names=list(features), **how)


def cases(rows: int) -> list[Case]:
    """Every kind of collection by itself, and all of them in one model."""
    pooled = Collection((bags("p0", rows, 16, "a"), bags("p1", rows + 7, 16, "b")))
    mean = Collection((bags("m0", rows, 16, "a", pooling=PoolingType.MEAN),))
    mixed = Collection(
        (bags("x0", rows, 8, "a"), bags("x1", rows, 32, "b"), bags("x2", 5, 64, "c"))
    )
    shared = Collection((bags("h0", rows, 16, "ab"), bags("h1", rows, 16, "a")))
    weighted = Collection((bags("w0", rows, 16, "ac"), bags("w1", rows, 8, "b")), weighted=True)
    sequence = Collection(
        tuple(
            EmbeddingConfig(rows, 16, name=f"s{i}", feature_names=[k]) for i, k in enumerate("bc")
        )
    )
    half = Collection((bags("f0", rows, 16, "a", data_type=DataType.FP16),))
    found = {
        "pooled": (pooled,),
        "mean": (mean,),
        "mixed widths": (mixed,),
        "shared features": (shared,),
        "weighted": (weighted,),
        "sequences": (sequence,),
        "float16": (half,),
        "all in one model": (pooled, mean, mixed, shared, weighted, sequence),
    }
    return [Case(name, collections) for name, collections in found.items()]


def trained_case(rows: int, data_type: DataType = DataType.FP32) -> Case:
    """Two widths, a shared table and weights: what the optimizers are tried on."""
    tables = (
        bags("t0", rows, 16, "ab", data_type=data_type),
        bags("t1", rows, 32, "c", data_type=data_type),
        bags("t2", rows // 3, 16, "c", data_type=data_type),
    )
    return Case("trained", (Collection(tables, weighted=True),))


def plan_of(
    case: Case, storage: Storage | None = None, rows: int = 1, cols: int = 1
) -> ShardingPlan:
    """Every table on rank 0, cut into so many blocks of rows and of columns."""
    placements = {}
    for table in case.tables:
        row_cuts = even_cuts(table.num_embeddings, rows)
        col_cuts = even_cuts(table.embedding_dim, cols, 4)
        owners = tuple((0,) * (len(col_cuts) - 1) for _ in row_cuts[1:])
        layout = TableLayout(row_cuts, col_cuts, owners)
        placements[table.name] = TablePlacement(layout, storage or Storage())
    return ShardingPlan(world_size=1, tables=placements)


def shard(
    case: Case,
    optimizer: SparseOptimizer,
    settings: Settings,
    plan: ShardingPlan | None = None,
    **how: Any,
) -> DistributedModelParallel:
    """The sharded model of a case on this one rank."""
    return DistributedModelParallel(
        Model(case, "meta"),
        plan=plan or plan_of(case),
        sparse_optimizer=optimizer,
        device=settings.device,
        seed=settings.seed,
        **how,
    )


def target_of(output: Tensor, step: int) -> Tensor:
    """The gradient that a step trains with: small, and different for every value."""
    numbers = torch.arange(output.numel(), dtype=torch.float32, device=output.device)
    return torch.sin(numbers * (0.37 + 0.01 * step)) * 0.1


def train(model: DistributedModelParallel, kjt: KeyedJaggedTensor, step: int) -> Tensor:
    """One step on a batch that lies on the CPU; returns the output before the update."""
    output = model(kjt.to(model.device))
    (output * target_of(output, step)).sum().backward()
    return output.detach()


def compare_training(
    case: Case,
    optimizer: SparseOptimizer,
    settings: Settings,
    plan: ShardingPlan | None = None,
    steps: int = 4,
) -> dict[str, float]:
    """Train a case sharded and unsharded; the largest differences of outputs, rows and state.

    Raises:
        Differs: they are not the same.
    """
    model = shard(case, optimizer, settings, plan)
    reference = Reference(case, optimizer, settings.seed)
    within = tolerance(case.tables)
    worst = {"output": 0.0, "rows": 0.0, "state": 0.0}
    for step in range(steps):
        kjt = case.batch(settings.choose(200, 40, 12), 6, settings.seed + step)
        wanted = reference.step(kjt, target_of(torch.empty(_outputs(model, kjt)), step))
        got = train(model, kjt, step)
        off = assert_close(f"output of step {step}", got, wanted, **within)
        worst["output"] = max(worst["output"], off)
    compare_states(model, reference, worst)
    kjt = case.batch(40, 6, settings.seed + 99)
    with torch.no_grad():
        got = model(kjt.to(model.device))
    assert_close("output of an evaluation", got, reference.forward(kjt), **within)
    compare_states(model, reference, worst)  # an evaluation updates nothing
    return worst


def compare_states(
    model: DistributedModelParallel, reference: Reference, worst: dict[str, float]
) -> None:
    """Rows and optimizer state of every shard against the unsharded model's.

    Raises:
        Differs: they are not the same.
    """
    within = tolerance(reference.case.tables)
    for state in model.shard_states():
        shard, name = state.shard, state.shard.table
        rows, cols = (slice(part.start, part.stop) for part in (shard.rows, shard.cols))
        off = assert_close(
            f"rows of {name}", state.weight, reference.weights[name][rows, cols], **within
        )
        worst["rows"] = max(worst["rows"], off)
        for key, tensor in state.optimizer.items():
            wanted = reference.state[name][key]
            wanted = wanted[rows, cols] if wanted.dim() == 2 else wanted[rows]
            off = assert_close(f"{key} of {name}", tensor, wanted, **within)
            worst["state"] = max(worst["state"], off)


def _outputs(model: DistributedModelParallel, kjt: KeyedJaggedTensor) -> int:
    with torch.no_grad():
        return model(kjt.to(model.device)).numel()
