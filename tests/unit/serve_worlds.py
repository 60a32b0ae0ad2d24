"""Worlds for the tests of serving: a checkpoint of a click model, and the model in memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from rayrec.data import DenseColumn, Feature, FeatureSchema, ParquetDataset, to_batch
from rayrec.layout import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, PoolingType
from rayrec.models import DLRM, DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.recipe import ModelRecipe
from rayrec.serve import export
from tests.unit.checkpoint_worlds import Truth, random_plan, save_world

WIDTH = 8


def a_schema(weighted: bool = False) -> FeatureSchema:
    """Plain and hashed ids, lists, a shared table, a mean, and two dense columns."""
    table = {"embedding_dim": WIDTH}
    return FeatureSchema(
        label="click",
        dense=(DenseColumn(column="age", fill=0.5), DenseColumn(column="price")),
        features=(
            Feature(name="user", column="user", hash_buckets=40),
            Feature(name="item", column="item"),
            Feature(name="seen", column="seen", weights="seen_w" if weighted else None),
            Feature(name="words", column="words", hash_buckets=30),
        ),
        tables=(
            EmbeddingBagConfig(num_embeddings=50, name="user", feature_names=["user"], **table),
            EmbeddingBagConfig(
                num_embeddings=60, name="item", feature_names=["item", "seen"], **table
            ),
            EmbeddingBagConfig(
                num_embeddings=30,
                name="words",
                feature_names=["words"],
                pooling=PoolingType.MEAN,
                **table,
            ),
        ),
    )


def rows(count: int, seed: int = 0, weighted: bool = False) -> pa.Table:
    """Rows of `a_schema`, with nulls and empty lists."""
    rng = np.random.default_rng(seed)
    seen = [rng.integers(0, 60, rng.integers(0, 4)).tolist() for _ in range(count)]
    words = [[f"w{k}" for k in rng.integers(0, 99, rng.integers(0, 3))] for _ in range(count)]
    columns = {
        "click": rng.integers(0, 2, count).astype(np.float32),
        "age": pa.array([None if k % 7 == 3 else float(k % 5) for k in range(count)]),
        "price": rng.normal(size=count),
        "user": [f"u{k}" for k in rng.integers(0, 1000, count)],
        "item": rng.integers(0, 60, count),
        "seen": pa.array(seen, pa.list_(pa.int64())),
        "words": pa.array([None if k % 5 == 1 else one for k, one in enumerate(words)]),
    }
    if weighted:
        weights = [[float(x) for x in rng.normal(size=len(one))] for one in seen]
        columns["seen_w"] = pa.array(weights, pa.list_(pa.float32()))
    return pa.table(columns)


class World(NamedTuple):
    """A saved checkpoint, and what was saved."""

    checkpoint: str
    schema: FeatureSchema
    module: nn.Module
    data: ParquetDataset

    def logits(self, table: pa.Table) -> Tensor:
        """Of the model in memory."""
        batch = to_batch(table, self.schema)
        with torch.no_grad():
            return self.module(batch)[1][1]


def a_model(schema: FeatureSchema, device: str | None = None) -> nn.Module:
    tables = schema.embedding_bag_configs()
    collection = EmbeddingBagCollection(tables, is_weighted=schema.is_weighted, device=device)
    return DLRMTrain(DLRM(collection, len(schema.dense), [16, WIDTH], [16, 1]))


def config_of(table: BaseEmbeddingConfig) -> EmbeddingBagConfig:
    """A table of a schema, as a checkpoint has it."""
    names, rows = list(table.feature_names), table.num_embeddings
    return EmbeddingBagConfig(rows, WIDTH, table.name, DataType.FP32, names)


def dense_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the dense part of a model."""
    parameters = module.named_parameters()
    return {name: p.detach().clone() for name, p in parameters if "embedding_bags" not in name}


def recipe_of(schema: FeatureSchema) -> ModelRecipe:
    """The recipe of `a_model`."""
    text = schema.to_json()
    return ModelRecipe(model="dlrm", schema=text, dense_layers=(16,), over_layers=(16,))


def a_world(
    folder: Path,
    seed: int = 0,
    ranks: int = 2,
    weighted: bool = False,
    with_recipe: bool = True,
    scale: float = 1.0,
    plan_seed: int | None = None,
) -> World:
    """Save a random click model from so many ranks under a random plan."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    schema = a_schema(weighted)
    module = a_model(schema).eval()
    collection = module.model.sparse_arch.embedding_bag_collection
    truths = []
    for table in schema.tables:
        weight = collection.embedding_bags[table.name].weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape) * scale)
        squares = torch.rand(weight.shape, dtype=torch.float64)
        state = rng.choice(["none", "row", "element"])
        truths.append(Truth(config_of(table), state, weight.detach().clone(), squares))
    checkpoint = str(folder / "step-00000007")
    save_world(
        checkpoint,
        truths,
        random_plan(rng if plan_seed is None else random.Random(plan_seed), truths, ranks),
        dense=dense_of(module),
        extras=recipe_of(schema).to_extras() if with_recipe else {},
        batch_bytes=rng.choice([200, 1000, 1 << 20]),
    )
    (folder / "eval").mkdir()
    pq.write_table(rows(400, seed, weighted), folder / "eval" / "rows.parquet")
    return World(checkpoint, schema, module, ParquetDataset(str(folder / "eval"), schema))


def an_artifact(folder: Path) -> Path:
    """Export the model of `a_world`; returns the artifact's folder."""
    world = a_world(folder)
    export(world.checkpoint, folder / "artifact", types="fp32", data=world.data)
    return folder / "artifact"
