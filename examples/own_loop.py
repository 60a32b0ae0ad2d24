"""Your own loop, with the library alone.

No Ray and no driver: `DistributedModelParallel` shards a model by a plan, and a pipeline reads and
routes the next batch during the step. This is one process; the same lines are one rank of eight
once a process group exists, the plan is for eight, and the loader is asked for this rank's part.
"""

import tempfile

import torch

from rayrec import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingShardingPlanner,
    RowWiseAdagrad,
    Topology,
)
from rayrec.data import FeatureSchema, ParquetDataset, SyntheticConfig, write_synthetic
from rayrec.distributed import table_configs
from rayrec.metrics import BinaryMetrics
from rayrec.models import DLRM, DLRMTrain
from rayrec.train import TrainPipelineSparseDist

with tempfile.TemporaryDirectory() as folder:
    paths = write_synthetic(folder, SyntheticConfig(rows_train=60_000, rows_eval=5_000, cap=10_000))
    schema = FeatureSchema.load(paths.schema)
    train, held_out = ParquetDataset(paths.train, schema), ParquetDataset(paths.eval, schema)

    tables = EmbeddingBagCollection(schema.embedding_bag_configs(), device="meta")
    module = DLRMTrain(DLRM(tables, len(schema.dense), [64, 16], [64, 1]))
    plan = EmbeddingShardingPlanner(Topology.local(1), batch_size=1024).plan(table_configs(module))
    # prefetch: connections of its own for the ids that travel ahead
    model = DistributedModelParallel(
        module, plan=plan, sparse_optimizer=RowWiseAdagrad(lr=0.1), prefetch=True, seed=0
    )
    # The tables are updated inside the backward pass, so this optimizer has the dense layers alone.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches = train.loader(rank=0, num_ranks=1, global_batch_size=1024, seed=0)
    losses = [step.loss.item() for step in pipeline.iterate(batches)]
    pipeline.close()
    print(
        f"{len(losses)} steps, loss {losses[0]:.3f} at the first and {losses[-1]:.3f} at the last"
    )

    metrics = BinaryMetrics()
    model.eval()
    with torch.no_grad():
        for batch in held_out.loader(rank=0, num_ranks=1, global_batch_size=1024, shuffle=False):
            _, (_, logits, labels) = model(batch)
            metrics.update(logits, labels)
    model.close()
    print(f"auc {metrics.compute().auc:.4f}")
