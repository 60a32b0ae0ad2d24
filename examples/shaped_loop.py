"""A run with a model, a loop, a metric, a schedule and early stopping of your own."""

import tempfile

import torch

from rayrec import Driver, EarlyStopping, EvaluationConfig, Metric, RunConfig, ScalingConfig, Task
from rayrec.data import FeatureSchema, ParquetDataset, SyntheticConfig, write_synthetic
from rayrec.models import DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import learning_rate_at, schedule


class Clicks(torch.nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.tables = EmbeddingBagCollection(schema.embedding_bag_configs(), device="meta")
        width = sum(t.embedding_dim * len(t.feature_names) for t in schema.tables)
        self.layer = torch.nn.Linear(width + len(schema.dense), 1)

    def forward(self, dense, ids):
        return self.layer(torch.cat([self.tables(ids).values(), dense], dim=1))


class Surprise(Metric):  # the share of clicks to which the model gave less than one in ten
    def start(self, device):
        return torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, state, predictions, labels):
        clicks = labels == 1
        state += torch.stack([(clicks & (predictions.sigmoid() < 0.1)).sum(), clicks.sum()])

    def scores(self, state):
        return {"surprise": float(state[0] / state[1])}


def loop(context):
    model, stages = context.shard(context.build()), schedule(400, warmup=20, decay="cosine")
    optimizer = torch.optim.Adam([p for _, p in model.dense_parameters()])
    context.track(optimizer)
    for batch in context.batches():
        model.set_learning_rate(learning_rate_at(context.step, 0.5, stages))
        loss, (_, logits, labels) = model(batch)
        optimizer.zero_grad()
        (loss * context.loss_weight(batch)).backward()
        optimizer.step()
        context.report(loss, logits, labels)


with tempfile.TemporaryDirectory() as folder:
    made = write_synthetic(folder, SyntheticConfig(rows_train=40_000, rows_eval=4_000))
    schema, task = FeatureSchema.load(made.schema), Task(name="click", metrics=(Surprise(),))
    data, held_out = ParquetDataset(made.train, schema), ParquetDataset(made.eval, schema)
    stop = EvaluationConfig(every_n_steps=20, score="ne", early_stopping=EarlyStopping(patience=2))
    run = RunConfig(global_batch_size=512, steps=400, tasks=(task,), evaluation=stop)
    driver = Driver(lambda: DLRMTrain(Clicks(schema)), data, ScalingConfig(num_workers=0), run,
                    eval_data=held_out, train_loop=loop)  # fmt: skip
    result = driver.fit()
    print(f"{result.steps} steps, auc {result.metrics['auc']:.4f}: {result.ended_early}")
