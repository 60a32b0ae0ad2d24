"""The trained model of a checkpoint, without its tables, as an export needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rayrec.checkpoint import (
    RestoredCheckpoint,
    check_tables,
    dense_tensors,
    load_dense,
    restore_checkpoint,
)
from rayrec.checkpoint.store import Store
from rayrec.dynamic.clock import clocks_in
from rayrec.errors import CheckpointError, ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_sequences import with_sequences
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.next_item_recipe import NextItemRecipe
from rayrec.quant import Reference, configs_of, exchanged, reference_collections
from rayrec.serve.live_rows import LiveRows
from rayrec.serve.manifest import BAGS, SEQUENCES, StoredCollection
from rayrec.serve.recipes import fields_of_recipe, recipe_in
from rayrec.serve.scorer import ONE_BINARY, Scorer
from rayrec.spec.task import Task


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedModel:
    """Training module whose dense part holds the weights of a checkpoint.

    Attributes:
        path: path of the checkpoint.
        restored: manifest and dense part of the checkpoint.
        module: training module; its tables are not read.
        collections: collections of the module, by name.
        schema: schema of the columns, or None.
        recipe: JSON data of the module's recipe; None for a module of the user's code.
        tasks: tasks of the run, where the module does not have them itself.
    """

    path: str
    restored: RestoredCheckpoint
    module: nn.Module
    collections: dict[str, Reference]
    schema: FeatureSchema | None
    recipe: dict[str, Any] | None
    tasks: Sequence[Task]

    def tables(self) -> list[BaseEmbeddingConfig]:
        """Return all tables, in the order of the collections, with the rows that they had."""
        saved = {table.name: table.num_embeddings for table in self.restored.manifest.tables}
        return [
            table.fitting(saved.get(table.name, 0))
            for one in self.collections.values()
            for table in configs_of(one)
        ]

    def live_rows(self) -> LiveRows:
        """Return a reader of the rows of the tables."""
        clocks = clocks_in(self.restored.extras)
        return LiveRows(self.path, self.restored.manifest, self.tables(), clocks)

    def scorer(self, places: Mapping[str, nn.Module]) -> Scorer:
        """Return a scorer of a copy of the module with other modules for its collections."""
        labels = 1 if self.schema is None else len(self.schema.labels)
        outputs = tuple((task.name, task.kind) for task in self.tasks)
        # one task has no name in what a module gives
        outputs = outputs if len(outputs) > 1 else tuple(("", kind) for _, kind in outputs)
        return Scorer(exchanged(self.module, places), labels, outputs or ONE_BINARY).eval()

    def check_unchanged(self) -> None:
        """Check that the rows of no id were taken out of the checkpoint since it was opened.

        Raises:
            CheckpointError: they were; one that is gone has not changed.
        """
        try:
            now = Store(self.path).manifest().sha256()
        except CheckpointError:
            return
        if now != self.restored.manifest.sha256():
            raise CheckpointError(
                f"{self.path} was written anew while it was exported, as by rayrec forget. Export "
                "it again."
            )

    @property
    def is_weighted(self) -> bool:
        """True if the ids of any collection have weights."""
        bags = (c for c in self.collections.values() if isinstance(c, EmbeddingBagCollection))
        return any(one.is_weighted() for one in bags)


def open_trained(
    checkpoint: str,
    model: Callable[[], nn.Module] | None = None,
    schema: FeatureSchema | None = None,
    tasks: Sequence[Task] = (),
) -> TrainedModel:
    """Build the model of a checkpoint and load its dense part.

    Args:
        model, schema, tasks: the arguments of `export`.
    Raises:
        CheckpointError: there is no checkpoint, or it is of another model, or damaged.
        ConfigError: the checkpoint has no recipe, the model no collection, or the schema does not
            fit the model.
    """
    restored = restore_checkpoint(checkpoint, [])
    recipe: dict[str, Any] | None = None
    if model is None:
        own = recipe_in(restored.extras, checkpoint)
        if isinstance(own, NextItemRecipe):
            schema = own.request_schema()
            own = replace(own, schema=schema.to_json())
        model, recipe = own, fields_of_recipe(own)
        schema = schema or FeatureSchema.from_json(own.schema, f"the schema of {checkpoint}")
        # a request has no more columns than the model reads
        schema = with_sequences(schema, own.sequences())
    with torch.random.fork_rng(devices=[]):
        module = model().eval()
    collections = reference_collections(module)
    if not collections:
        raise ConfigError(
            f"{type(module).__name__} holds no EmbeddingBagCollection and no EmbeddingCollection; "
            "model= builds the module that was trained, before it is sharded."
        )
    trained = TrainedModel(
        path=checkpoint,
        restored=restored,
        module=module,
        collections=collections,
        schema=schema,
        recipe=recipe,
        tasks=tasks,
    )
    check_tables(restored.manifest, trained.tables(), {}, checkpoint, may_resize=False)
    if recipe is None and schema is not None and schema.sequences:
        raise ConfigError(
            f"the schema reads the sequence {schema.sequences[0].name!r}, and a model of your code "
            "is served by ids and dense columns alone. Export a model without sequences of "
            "numbers, or score files with Driver.evaluate(predictions=...)."
        )
    if schema is not None and (trouble := schema_trouble(schema, trained.tables())):
        raise ConfigError(trouble)
    prefixes = tuple(f"{name}." if name else "" for name in collections)
    dense = [
        (name, p)
        for name, p in module.named_parameters()
        if p.requires_grad and not name.startswith(prefixes)
    ]
    load_dense(dense_tensors(dense, module), restored.dense, checkpoint)
    return trained


def schema_trouble(schema: FeatureSchema, tables: Sequence[BaseEmbeddingConfig]) -> str:
    """Return which ids a schema lets through that have no row, in a line; "" where all have one."""
    limits = schema.limits()
    for table in tables:
        for feature in table.feature_names:
            if feature not in limits:
                return (
                    f"the schema has no feature {feature!r}, which table {table.name!r} is looked "
                    f"up by; it has {sorted(limits)}."
                )
            if limits[feature] > table.id_limit:
                return (
                    f"the schema lets ids of feature {feature!r} up to {limits[feature] - 1} "
                    f"through, and table {table.name!r} has {table.num_embeddings} rows. Give the "
                    "schema that the model was trained with."
                )
    return ""


def stored_collection(name: str, collection: Reference) -> StoredCollection:
    """Return a collection of a model in the form of an artifact's manifest."""
    is_bags = isinstance(collection, EmbeddingBagCollection)
    tables = tuple(
        (table.name, tuple(table.feature_names), table.pooling.value)  # type: ignore[attr-defined]
        for table in configs_of(collection)
    )
    return StoredCollection(
        name=name,
        kind=BAGS if is_bags else SEQUENCES,
        is_weighted=isinstance(collection, EmbeddingBagCollection) and collection.is_weighted(),
        need_indices=isinstance(collection, EmbeddingCollection) and collection.need_indices(),
        tables=tables,
    )
