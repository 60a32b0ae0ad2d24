"""Rows on which an export compares the artifact with the model: of data, or made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.data import Batch, FileDataset
from rayrec.dynamic.columns import NO_KEY
from rayrec.errors import InputError
from rayrec.layout.schema_sequences import aligned_groups
from rayrec.serve.trained_model import TrainedModel
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor

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
