"""`Batch`: one rank's rows of one global batch, as the tensors a model takes.

Plain data; moving it to a device is its only behaviour. A rank may hold no rows (B = 0) in a short
last batch, and ranks may differ by one row, so losses are weighted by `rows / global_rows`, never
by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.data.origin import RowOrigin
from rayrec.modules import row_keys
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


class BatchPlace(NamedTuple):
    """Place of a rank's rows in a run, from which the keys of their dropout are made.

    Attributes:
        seed: of the run and the epoch.
        step: number of the global batch in the epoch.
        first_row: number of the rank's first row in the global batch.
    """

    seed: int
    step: int
    first_row: int


def keys_of(batch: object) -> Tensor | None:
    """Return the keys of a batch's rows for dropout, (B,) int64; None of rows without a place."""
    place: BatchPlace | None = getattr(batch, "place", None)
    if place is None:
        return None
    ids: KeyedJaggedTensor = batch.sparse_features  # type: ignore[attr-defined]
    return row_keys(place.seed, place.step, place.first_row, ids.stride(), ids.device())


@dataclass(kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        dense_features: (B, I) float32.
        sparse_features: bags of B rows per feature, int64 ids, int32 lengths.
        labels: (B,) float32; (B, T) where the schema has T labels, T above 1. float64 where they
            hold whole numbers beyond 2**24, which float32 cannot.
        global_rows: rows of the global batch that this is a part of, over all ranks.
        weights: (B,) float32, weights of the rows in the loss; None where the schema has none.
        origin: file and number of each row, where the loader was asked for them; stays on the CPU.
        groups: by column of the schema's `groups`, (B,) int64: whole numbers as they are, text by
            its hash.
        sequences: by name of the schema's `sequences`, B lists of int64 or float32 numbers.
        place: where a loader read the rows for a run; None of rows that have no order.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor
    global_rows: int
    weights: Tensor | None = None
    origin: RowOrigin | None = None
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: Mapping[str, JaggedTensor] = field(default_factory=dict)
    place: BatchPlace | None = None

    @property
    def rows(self) -> int:
        """B, rows of this part."""
        return self.labels.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on another device; asynchronous only from pinned memory."""
        ids = self.sparse_features.to(torch.device(device), non_blocking=non_blocking)
        moved = {n: one.to(device, non_blocking) for n, one in self.sequences.items()}
        return self._with(ids, moved, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory (needs CUDA), from which device copies are asynchronous."""
        pinned = {name: one.pin_memory() for name, one in self.sequences.items()}
        ids = self.sparse_features.pin_memory()
        return self._with(ids, pinned, lambda tensor: tensor.pin_memory())

    def _with(
        self,
        ids: KeyedJaggedTensor,
        sequences: Mapping[str, JaggedTensor],
        change: Callable[[Tensor], Tensor],
    ) -> Batch:
        return Batch(
            dense_features=change(self.dense_features),
            sparse_features=ids,
            labels=change(self.labels),
            global_rows=self.global_rows,
            weights=None if self.weights is None else change(self.weights),
            origin=self.origin,
            groups={name: change(group) for name, group in self.groups.items()},
            sequences=sequences,
            place=self.place,
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the batch's device memory until the work now queued on `stream` is done."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)
        for group in self.groups.values():
            group.record_stream(stream)
        for sequence in self.sequences.values():
            sequence.record_stream(stream)
