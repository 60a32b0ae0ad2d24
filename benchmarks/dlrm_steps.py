"""The step of a whole DLRM, from Arrow record batches to updated weights: in turn as in a plain
loop, or in the sparse pipeline.

Both train the same model on the same record batches, bit for bit: dense layers 13-512-256-D, over
layers 512-256-1, Adam. Converting a record batch (columns to ids, lengths and dense rows, with all
checks) is part of the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.far import put_far
from benchmarks.ranks import ModelStep
from benchmarks.workload import Workload

DENSE = 13
STORED_S = 20e-3  # until storage answers: a request to an object store takes that long, or longer


def dlrm_step(
    work: Workload,
    rank: int,
    world_size: int,
    batches: Sequence[tuple[Tensor, Tensor]],
    variant: str,
) -> ModelStep:
    """`step(i)` on this rank; all ranks call it together.

    Args:
        batches: (ids, lengths) of local batches; labels and dense columns are drawn here.
        variant: "pipeline" in it runs `TrainPipelineSparseDist`, otherwise each step converts and
            then is `train_step`; with "far" in it the ranks exchange over `FarExchange`; with
            "stored" a batch takes `STORED_S` to arrive, during which the core is free.
    """
    from rayrec.data import Batch, DenseColumn, Feature, FeatureSchema, to_batch
    from rayrec.distributed import DistributedModelParallel
    from rayrec.layout import EmbeddingBagConfig, Topology
    from rayrec.models import DLRM, DLRMTrain
    from rayrec.modules import EmbeddingBagCollection
    from rayrec.optim import RowWiseAdagrad
    from rayrec.planner import EmbeddingShardingPlanner
    from rayrec.train import TrainPipelineSparseDist, train_step

    tables = [
        EmbeddingBagConfig(n, work.dim, name=f"t{i}", feature_names=[work.keys[i]])
        for i, n in enumerate(work.rows)
    ]
    schema = FeatureSchema(
        label="label",
        dense=tuple(DenseColumn(column=f"d{i}") for i in range(DENSE)),
        features=tuple(Feature(name=key, column=key) for key in work.keys),
        tables=tuple(tables),
    )
    rng = np.random.default_rng(rank)
    records = [record_batch(work, rng, ids, lengths) for ids, lengths in batches]

    def read(i: int) -> Batch:
        if "stored" in variant:
            time.sleep(STORED_S)
        batch = to_batch(records[i % len(records)], schema)
        batch.global_rows = work.batch
        return batch

    torch.manual_seed(0)
    plan = EmbeddingShardingPlanner(
        Topology.local(world_size, memory_bytes=16 << 30),
        work.batch // world_size,
        kinds=["table_wise"],
    ).plan(tables)
    collection = EmbeddingBagCollection(tables, device="meta")
    module = DLRMTrain(DLRM(collection, DENSE, [512, 256, work.dim], [512, 256, 1]))
    model = DistributedModelParallel(
        module,
        plan=plan,
        sparse_optimizer=RowWiseAdagrad(lr=work.lr),
        seed=0,
        prefetch="pipeline" in variant,
    )
    if "far" in variant:
        put_far(model)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    if "pipeline" not in variant:
        return ModelStep(lambda i: train_step(model, dense, read(i), world_size), model)
    pipeline = TrainPipelineSparseDist(model, dense, "cpu", world_size=world_size)
    stream: Iterator[Batch] = (read(i) for i in count())
    return ModelStep(lambda i: pipeline.advance(stream), model)


def record_batch(
    work: Workload, rng: np.random.Generator, ids: Tensor, lengths: Tensor
) -> pa.RecordBatch:
    """A record batch of labels, dense columns and lists of ids."""
    rows = lengths.numel() // work.tables
    offsets = pa.array(np.arange(0, rows * work.pooling + 1, work.pooling, dtype=np.int32))
    columns: dict[str, pa.Array] = {"label": pa.array(rng.integers(0, 2, rows).astype(np.float32))}
    columns |= {f"d{i}": pa.array(rng.random(rows, np.float32)) for i in range(DENSE)}
    for key, values in zip(work.keys, ids.numpy().reshape(work.tables, -1), strict=True):
        columns[key] = pa.ListArray.from_arrays(offsets, pa.array(values))
    return pa.RecordBatch.from_pydict(columns)
