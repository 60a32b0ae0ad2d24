"""Resume a run, and start another from its weights.

`resume_from` goes on exactly where a run stopped: weights, optimizers, step and place in the data.
`init_from` starts a new run at step 0 with the weights of an old one, on any data. Both take a
checkpoint that any number of ranks wrote under any plan.
"""

import tempfile

from rayrec import Driver, EmbeddingBagCollection, RunConfig, ScalingConfig
from rayrec.data import FeatureSchema, ParquetDataset, SyntheticConfig, write_synthetic
from rayrec.models import DLRM, DLRMTrain


def fit(data, eval_data, schema, **options):
    """Train one run on one rank in this process."""

    def build_model():
        tables = EmbeddingBagCollection(schema.embedding_bag_configs(), device="meta")
        return DLRMTrain(DLRM(tables, len(schema.dense), [64, 16], [64, 1]))

    run = RunConfig(global_batch_size=1024, progress="off", **options)
    return Driver(build_model, data, ScalingConfig(num_workers=0), run, eval_data).fit()


with tempfile.TemporaryDirectory() as folder:
    made = SyntheticConfig(rows_train=60_000, rows_eval=5_000, cap=10_000)
    paths = write_synthetic(f"{folder}/data", made)
    schema = FeatureSchema.load(paths.schema)
    train, held_out = ParquetDataset(paths.train, schema), ParquetDataset(paths.eval, schema)
    runs = f"{folder}/runs"

    # a run that ends after 30 steps, and the same run continued to 50
    first = fit(train, held_out, schema, steps=30, storage_path=runs, name="run")
    more = {"steps": 50, "storage_path": runs, "name": "run", "resume_from": "latest"}
    again = fit(train, held_out, schema, **more)
    # the same 50 steps without a break
    whole = fit(train, held_out, schema, steps=50)
    print(f"step {first.steps}: auc {first.metrics['auc']:.6f}")
    print(f"resumed, step {again.steps}: auc {again.metrics['auc']:.6f}")
    print(f"without a break, step {whole.steps}: auc {whole.metrics['auc']:.6f}")

    # new runs of five steps: from these weights, and from nothing
    warm = fit(train, held_out, schema, steps=5, init_from=again.checkpoint)
    cold = fit(train, held_out, schema, steps=5)
    print(f"5 steps from its weights: auc {warm.metrics['auc']:.4f}")
    print(f"5 steps from nothing: auc {cold.metrics['auc']:.4f}")
