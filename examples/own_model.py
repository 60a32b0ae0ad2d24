"""Your own model, trained by the driver.

A model is a module whose `forward(batch)` returns `(loss, (loss, logits, labels))`. Its tables lie
on the meta device, so no process ever holds a whole one: the driver places them, trains, evaluates
and saves. The data are made here, and the best possible AUC is known.

`python examples/own_model.py` runs one rank in this process, `python examples/own_model.py 2` runs
two Ray ranks on this machine.
"""

import json
import sys
import tempfile

import torch
from torch import nn

from rayrec import Driver, EmbeddingBagCollection, OptimizerConfig, RunConfig, ScalingConfig
from rayrec.data import FeatureSchema, ParquetDataset, SyntheticConfig, write_synthetic


class ClickModel(nn.Module):
    """The rows of all features beside the dense columns, through two layers."""

    def __init__(self, schema):
        super().__init__()
        tables = schema.embedding_bag_configs()
        self.tables = EmbeddingBagCollection(tables, device="meta")
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        inputs = width + len(schema.dense)
        self.layers = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        rows = self.tables(batch.sparse_features).values()  # (B, width)
        logits = self.layers(torch.cat([rows, batch.dense_features], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


with tempfile.TemporaryDirectory() as folder:
    paths = write_synthetic(folder, SyntheticConfig(rows_train=60_000, rows_eval=5_000, cap=10_000))
    schema = FeatureSchema.load(paths.schema)
    driver = Driver(
        lambda: ClickModel(schema),
        data=ParquetDataset(paths.train, schema),
        eval_data=ParquetDataset(paths.eval, schema),
        scaling=ScalingConfig(num_workers=int(sys.argv[1]) if len(sys.argv) > 1 else 0),
        run=RunConfig(
            global_batch_size=1024,
            epochs=1,
            storage_path=f"{folder}/runs",
            sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.1),
        ),
    )
    result = driver.fit()
    best = json.loads(paths.truth.read_text())["bayes_auc"]
    print(f"auc {result.metrics['auc']:.4f} of at most {best:.4f}, saved as {result.checkpoint}")
