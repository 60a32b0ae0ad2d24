"""Logits of a trained model for a sample of rows: the float32 reference of a packed artifact.

A sample of evaluation rows reads few rows of each table. They are kept with their ids, and looked
up by them, so that the trained model can be run where its tables would not fit.

    # n rows that are kept of a table, D its width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError, RayrecError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
    pool_bags,
)
from rayrec.serve.sample import ParitySample
from rayrec.serve.trained_model import TrainedModel
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.storage import one_line


class SampledRows(NamedTuple):
    """Some rows of a table: ids (n,) int64, ascending; values (n, D) float32."""

    ids: Tensor
    values: Tensor


def ids_of(tables: Iterable[BaseEmbeddingConfig], batch: KeyedJaggedTensor) -> dict[str, Tensor]:
    """Return the ids that a batch looks up in each table, each once, ascending."""
    return {
        table.name: torch.cat([batch[f].values() for f in table.feature_names]).long().unique()
        for table in tables
    }


class _SampledBags(nn.Module):
    """Reference collection of pooled tables that looks up in kept rows.

    Args:
        kept: the rows of every table; those that a batch looks up must be among them.
    """

    def __init__(self, collection: EmbeddingBagCollection, kept: Mapping[str, SampledRows]) -> None:
        super().__init__()
        self._tables, self._kept = collection.embedding_bag_configs(), kept
        self._is_weighted = collection.is_weighted()
        names = get_embedding_names_by_table(self._tables)
        self._names = [name for own in names for name in own]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows of every feature, as `EmbeddingBagCollection` does."""
        pooled, widths = [], []
        for table in self._tables:
            kept = self._kept[table.name]
            for feature in table.feature_names:
                bags = features[feature]
                places = torch.searchsorted(kept.ids, bags.values().long())
                own = JaggedTensor(places, lengths=bags.lengths())
                per_id = bags.weights() if self._is_weighted else None
                pooled.append(pool_bags(kept.values, own, table.pooling, per_id))
                widths.append(table.embedding_dim)
        return KeyedTensor(self._names, widths, torch.cat(pooled, dim=1))


class _SampledSequences(nn.Module):
    """Reference collection of sequences that looks up in kept rows."""

    def __init__(self, collection: EmbeddingCollection, kept: Mapping[str, SampledRows]) -> None:
        super().__init__()
        self._tables, self._kept = collection.embedding_configs(), kept
        self._names = collection.embedding_names_by_table()
        self._need_indices = collection.need_indices()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of every feature's ids, as `EmbeddingCollection` does."""
        outputs = {}
        for table, names in zip(self._tables, self._names, strict=True):
            kept = self._kept[table.name]
            for feature, name in zip(table.feature_names, names, strict=True):
                bags = features[feature]
                places = torch.searchsorted(kept.ids, bags.values().long())
                rows = functional.embedding(places, kept.values)
                ids = bags.values() if self._need_indices else None
                outputs[name] = JaggedTensor(rows, ids, lengths=bags.lengths())
        return outputs


@torch.inference_mode()
def sample_scores(
    trained: TrainedModel, kept: Mapping[str, SampledRows], sample: ParitySample
) -> tuple[Tensor, ...]:
    """Return the logits of the trained model, with the kept rows in its tables."""
    places: dict[str, nn.Module] = {
        name: _SampledBags(one, kept)
        if isinstance(one, EmbeddingBagCollection)
        else _SampledSequences(one, kept)
        for name, one in trained.collections.items()
    }
    batch = sample.batch
    outputs: tuple[Tensor, ...] = trained.scorer(places)(
        batch.dense_features, batch.sparse_features, batch.sequences
    )
    return outputs


def check_takes_ids(trained: TrainedModel, sample: ParitySample) -> None:
    """Check that a model without a schema takes the made-up rows, which have no dense columns.

    Raises:
        ConfigError: the model refuses them.
    """
    ids = ids_of(trained.tables(), sample.batch.sparse_features)
    zeros = {
        table.name: SampledRows(
            ids[table.name], torch.zeros(len(ids[table.name]), table.embedding_dim)
        )
        for table in trained.tables()
    }
    try:
        sample_scores(trained, zeros, sample)
    except RayrecError:
        raise
    # a user's model may raise any type of error for a wrong number of columns
    except Exception as error:
        raise ConfigError(
            f"the checkpoint has no schema, and {type(trained.module).__name__} does not take rows "
            f"of ids alone ({type(error).__name__}: {one_line(error)}). Give schema=, by which it "
            "was trained, or data= with rows of it."
        ) from error
