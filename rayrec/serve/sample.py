"""Rows on which an export compares the artifact with the model, and the model's logits for them.

The rows are of data, or made up. They read few rows of each table, which are kept with their ids
and looked up by them, so that the trained model, the float32 reference of the packed artifact, can
be run where its tables would not fit.

    # n rows that are kept of a table, D its width
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.data import Batch, FileDataset
from rayrec.dynamic.columns import NO_KEY
from rayrec.errors import ConfigError, InputError, RayrecError
from rayrec.layout.schema_sequences import aligned_groups
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
    pool_bags,
)
from rayrec.serve.trained_model import TrainedModel
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.storage import one_line

_SEED = 20_011  # of the order of a sample: any number, but always the same
_NONE = torch.empty(0, dtype=torch.int64)
_LENGTHS = torch.tensor([0, 1, 1, 1, 2, 5])  # lengths of made-up bags


@dataclass(frozen=True, kw_only=True, slots=True)
class ParitySample:
    """Rows on which an artifact is compared with its model.

    Attributes:
        batch: the rows.
        source: path of the data of the rows, or "random rows".
        has_labels: the labels of the batch are those of data, not made up.
    """

    batch: Batch
    source: str
    has_labels: bool


def parity_sample(
    trained: TrainedModel, data: FileDataset | None, rows: int, keys: Mapping[str, Tensor]
) -> ParitySample:
    """Return the first rows of one fixed random order of a data set, or random rows without one.

    Args:
        keys: ids of the rows of dynamic tables, by table; random rows hold some of them.
    Raises:
        InputError: the data lack a feature that the model looks up; names it.
    """
    if data is None:
        return _random(trained, rows, keys)
    rows = min(rows, data.num_rows)
    with data.loader(0, 1, rows, shuffle=True, seed=_SEED, threaded=False) as loader:
        batch = next(loader)
    sample = ParitySample(batch=batch, source=f"the rows of {data.path}", has_labels=True)
    held = batch.sparse_features.keys()
    for feature in (f for table in trained.tables() for f in table.feature_names):
        if feature not in held:
            raise InputError(
                f"{sample.source} have no feature {feature!r}, which the model looks up; they have "
                f"{sorted(held)}."
            )
    return sample


def _random(trained: TrainedModel, rows: int, keys: Mapping[str, Tensor]) -> ParitySample:
    """Draw rows of random ids and normal dense columns; their labels mean nothing."""
    generator = torch.Generator().manual_seed(_SEED)
    limits, known = dict[str, int](), dict[str, Tensor]()
    for table in trained.tables():
        for feature in table.feature_names:
            limits[feature] = min(table.num_embeddings, limits.get(feature, table.num_embeddings))
            known.setdefault(feature, keys.get(table.name, _NONE))
            if table.dynamic is None:
                known[feature] = _NONE  # its ids have to lie in that table
    drawn = torch.randint(0, len(_LENGTHS), (len(limits), rows), generator=generator)
    groups = {} if trained.schema is None else aligned_groups(trained.schema)
    shared = [groups.get(name, name) for name in limits]
    drawn = drawn[[shared.index(group) for group in shared]]
    lengths = _LENGTHS[drawn]
    ids = [
        torch.randint(0, limit, (int(own.sum()),), generator=generator)
        for limit, own in zip(limits.values(), lengths, strict=True)
    ]
    for number, own in enumerate(known.values()):
        live = own[own != NO_KEY]
        if len(live):
            ids[number] = live[ids[number] % len(live)]
    values = torch.cat(ids)
    columns = 0 if trained.schema is None else len(trained.schema.dense)
    sequences: dict[str, JaggedTensor] = {}
    of_group = dict(zip(shared, lengths, strict=True))
    for sequence in () if trained.schema is None else trained.schema.sequences:
        # times of a history ascend; what is beside no feature has one number in each row
        own = of_group.get(groups[sequence.name], torch.ones(rows, dtype=torch.int64))
        times = torch.randint(0, 1 << 30, (int(own.sum()),), generator=generator)
        sequences[sequence.name] = JaggedTensor(times.sort().values, lengths=own.int())
    batch = Batch(
        dense_features=torch.randn(rows, columns, generator=generator),
        sparse_features=KeyedJaggedTensor(
            list(limits),
            values,
            torch.ones(len(values)) if trained.is_weighted else None,
            lengths=lengths.flatten().int(),
            stride=rows,
        ),
        labels=torch.zeros(rows),
        global_rows=rows,
        sequences=sequences,
    )
    return ParitySample(batch=batch, source="random rows", has_labels=False)


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
