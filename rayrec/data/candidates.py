"""Batches of next-item models: rows, and the candidates of the softmax.

Candidates are one more feature: a rank's slice of all items, or negatives. They depend on the seed,
the step and the rank alone, so that they travel ahead as the ids of the rows do, and a resumed run
draws what the run would have drawn. Negatives do not depend on the rank either: 1, 2 and 4 ranks
draw the same. The feature has one bag for a batch, also where a rank has no rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rayrec.checks import whole_number
from rayrec.data.batch import Batch
from rayrec.data.hashing import mix_int, random_bits
from rayrec.data.rows import RowDataset
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.sparse import KeyedJaggedTensor

_NEGATIVES = 3  # what the derived seed is for, beside those of `rayrec.data.order`


class Candidates(Protocol):
    """The items that a rank scores in a step."""

    def ids(self, seed: int, step: int, rank: int, num_ranks: int) -> NDArray[Any]:
        """Return ids, int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemSlices:
    """All items, a slice for each rank: rank r of W has [r * N // W, (r + 1) * N // W).

    Attributes:
        num_items: N.
    """

    num_items: int

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("num_items", self.num_items)

    def ids(self, seed: int, step: int, rank: int, num_ranks: int) -> NDArray[Any]:
        """Return the ids of the rank's slice."""
        first, stop = (self.num_items * r // num_ranks for r in (rank, rank + 1))
        return np.arange(first, stop, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedNegatives:
    """Items drawn with replacement, the same on all ranks.

    Attributes:
        count: items of a batch.
        num_items: number of the items.
        proposal: "uniform"; "popularity": by `counts`; or "mixed": the first half uniformly, the
            others by `counts`.
        counts: (num_items,) whole numbers of at least 0, such as how often each item is a target.
    Raises:
        ConfigError: counts are missing, too many, negative or all 0.
    """

    count: int
    num_items: int
    proposal: Literal["uniform", "popularity", "mixed"] = "popularity"
    counts: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("count", self.count)
        whole_number("num_items", self.num_items)
        counts = self.counts
        if counts is not None and not isinstance(counts, np.ndarray):
            raise ConfigError(
                f"SharedNegatives has counts={counts!r}; it must be an array of numbers, or None."
            )
        if (self.proposal == "uniform") != (counts is None):
            raise ConfigError(
                f"proposal={self.proposal!r} and counts={'given' if counts is not None else None}: "
                "popularity and mixed draw by counts, and uniform needs none."
            )
        if counts is None:
            return
        if counts.shape != (self.num_items,) or counts.min() < 0 or not counts.any():
            raise ConfigError(
                f"counts {counts.shape} of {self.num_items} items must be one number of at least "
                "0 for each of them, and not all 0."
            )

    def ids(self, seed: int, step: int, rank: int, num_ranks: int) -> NDArray[Any]:
        """Return the ids of the step."""
        bits = random_bits(mix_int(_NEGATIVES, seed, step), 0, self.count)
        uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        drawn = (uniform * self.num_items).astype(np.int64)
        if self.counts is not None:
            first, ends = self._uniform_draws, self._ends
            drawn[first:] = np.searchsorted(ends, uniform[first:] * ends[-1], side="right")
        return drawn

    def log_q(self) -> NDArray[np.float32]:
        """Return the log of the chance of each id in a draw, (num_items,): the mean over the draws.

        An id that cannot be drawn has the chance of half a count: it needs only a finite number.
        """
        if self.counts is None:
            return np.full(self.num_items, -np.log(self.num_items), dtype=np.float32)
        part, total = self._uniform_draws / self.count, self.counts.sum(dtype=np.float64)
        shares = part / self.num_items + (1.0 - part) * (self.counts / total)
        shares[shares == 0.0] = 0.5 / total
        return np.log(shares).astype(np.float32)

    @cached_property
    def _ends(self) -> NDArray[Any]:
        assert self.counts is not None, "only draws by popularity ask for it"
        # sums of float32 counts would stand still from 2**24 on
        return np.cumsum(self.counts, 0, np.float64)

    @property
    def _uniform_draws(self) -> int:
        return self.count // 2 if self.proposal == "mixed" else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NextItemDataset:
    """A dataset whose batches hold the candidates that a next-item model is trained with, as a
    feature of one bag beside those of the rows.

    Attributes:
        data: dataset of rows in files or in memory.
        candidates: chooses the ids.
        feature: name of the feature.
    """

    data: RowDataset
    candidates: Candidates
    feature: str = "candidates"

    @property
    def num_rows(self) -> int:
        """Rows in one epoch."""
        return self.data.num_rows

    def num_batches(self, global_batch_size: int, drop_last: bool = False) -> int:
        """Global batches in one epoch."""
        return self.data.num_batches(global_batch_size, drop_last)

    def fingerprint(self) -> str:
        """Return the fingerprint of the rows."""
        return self.data.fingerprint()

    def loader(
        self,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
        seed: int = 0,
        epoch: int = 0,
        start_batch: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield this rank's parts of the global batches from `start_batch` on."""
        batches = self.data.loader(
            rank,
            num_ranks,
            global_batch_size,
            seed=seed,
            epoch=epoch,
            start_batch=start_batch,
            shuffle=shuffle,
            drop_last=drop_last,
            threaded=False,  # who trains has a thread that reads
        )
        first_step = epoch * self.num_batches(global_batch_size, drop_last)
        for step, batch in enumerate(batches, first_step + start_batch):
            ids = torch.from_numpy(self.candidates.ids(seed, step, rank, num_ranks))
            features = with_bag(batch.sparse_features, self.feature, ids)
            yield replace(batch, sparse_features=features)


def with_bag(kjt: KeyedJaggedTensor, feature: str, ids: torch.Tensor) -> KeyedJaggedTensor:
    """Return a batch with one more feature, of one bag whatever the number of rows."""
    lengths, keys = kjt.lengths().view(-1), list(kjt.keys())
    return KeyedJaggedTensor(
        keys=[*keys, feature],
        values=torch.cat([kjt.values(), ids.to(kjt.values())]),
        lengths=torch.cat([lengths, lengths.new_tensor([len(ids)])]),
        stride_per_key_per_rank=[[kjt.stride()]] * len(keys) + [[1]],
    )
