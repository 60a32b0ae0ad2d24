"""Rows on which an export compares the artifact with the model: of data, or made up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rayrec.data import Batch, FileDataset
from rayrec.errors import InputError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.serve.parity import SAMPLE_SEED, ParitySample
from rayrec.sparse import KeyedJaggedTensor

_LENGTHS = torch.tensor([0, 1, 1, 1, 2, 5])  # lengths of made-up bags


def sample_of(data: FileDataset, rows: int) -> ParitySample:
    """Return the first rows of one fixed random order of a data set."""
    rows = min(rows, data.num_rows)
    loader = data.loader(0, 1, rows, shuffle=True, seed=SAMPLE_SEED, threaded=False)
    with loader:
        batch = next(loader)
    return ParitySample(batch=batch, source=f"the rows of {data.path}", has_labels=True)


def random_sample(
    tables: Iterable[BaseEmbeddingConfig], rows: int, dense_columns: int, is_weighted: bool
) -> ParitySample:
    """Draw rows of random ids and normal dense columns; their labels mean nothing."""
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    limits: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            limits[feature] = min(table.num_embeddings, limits.get(feature, table.num_embeddings))
    drawn = torch.randint(0, len(_LENGTHS), (len(limits), rows), generator=generator)
    lengths = _LENGTHS[drawn]
    ids = [
        torch.randint(0, limit, (int(own.sum()),), generator=generator)
        for limit, own in zip(limits.values(), lengths, strict=True)
    ]
    values = torch.cat(ids)
    batch = Batch(
        dense_features=torch.randn(rows, dense_columns, generator=generator),
        sparse_features=KeyedJaggedTensor(
            list(limits),
            values,
            torch.ones(len(values)) if is_weighted else None,
            lengths=lengths.flatten().int(),
            stride=rows,
        ),
        labels=torch.zeros(rows),
        global_rows=rows,
    )
    return ParitySample(batch=batch, source="random rows", has_labels=False)


def check_sample(sample: ParitySample, limits: Mapping[str, int]) -> None:
    """Check that a sample has the features that the tables are looked up by.

    Raises:
        InputError: names the feature that it lacks.
    """
    keys = set(sample.batch.sparse_features.keys())
    for feature in limits:
        if feature not in keys:
            raise InputError(
                f"{sample.source} have no feature {feature!r}, which the model looks up; they have "
                f"{sorted(keys)}."
            )
