"""`RandomRecDataset`: batches of random ids, dense values and labels, to try a model's code.

Nothing can be learned of them; `write_synthetic` makes data that have a truth. Arguments, order of
the random draws and so the batches of a seed are TorchRec's; what is made is a `Batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from rayrec.data.batch import Batch
from rayrec.errors import ConfigError
from rayrec.sparse import KeyedJaggedTensor


class RandomRecDataset(IterableDataset[Batch]):
    """Random batches of one rank; each pass over it gives the same ones.

    Args:
        keys: names of the features.
        hash_size, hash_sizes: ids lie below it; for all features (100), or for each.
        ids_per_feature, ids_per_features: most ids of a bag; for all features (2), or for each.
        num_dense: dense columns.
        manual_seed: of the random numbers; torch's own stream when None.
        num_batches: of a pass; without end when None.
        num_generated_batches: so many are made beforehand and repeat; negative makes each anew.
        min_ids_per_feature, min_ids_per_features: least ids of a bag; by default
            `ids_per_feature`, or 0 where it is not given.
    Raises:
        ConfigError: a list has another length than `keys`, or `num_generated_batches` is 0.
    """

    def __init__(
        self,
        keys: Sequence[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: Sequence[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: Sequence[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if min_ids_per_feature is None:
            min_ids_per_feature = ids_per_feature
        self._keys, self._rows, self._num_dense = list(keys), batch_size, num_dense
        self._limits = self._each("hash_sizes", hash_sizes, hash_size or 100)
        self._most = self._each("ids_per_features", ids_per_features, ids_per_feature or 2)
        self._least = self._each(
            "min_ids_per_features", min_ids_per_features, min_ids_per_feature or 0
        )
        if not num_generated_batches:
            raise ConfigError(
                "num_generated_batches=0 leaves nothing to repeat; give a number above 0, or -1 "
                "for batches that are made when they are asked for."
            )
        self.num_batches = num_batches
        self._generator = None
        if manual_seed is not None:
            self._generator = torch.Generator().manual_seed(manual_seed)
        self._made = [self._make() for _ in range(num_generated_batches)]

    def __iter__(self) -> Iterator[Batch]:
        made = self._made
        return islice(
            (made[i % len(made)] if made else self._make() for i in count()), self.num_batches
        )

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("a RandomRecDataset without num_batches has no end, and no length")
        return self.num_batches

    def _each(self, name: str, given: Sequence[int] | None, usual: int) -> list[int]:
        values = [usual] * len(self._keys) if given is None else list(given)
        if len(values) != len(self._keys):
            raise ConfigError(f"{name} has {len(values)} numbers for {len(self._keys)} keys.")
        return values

    def _make(self) -> Batch:
        lengths: list[Tensor] = []
        ids: list[Tensor] = []
        for limit, least, most in zip(self._limits, self._least, self._most, strict=True):
            size = (self._rows,)
            lengths.append(
                torch.randint(least, most + 1, size, dtype=torch.int32, generator=self._generator)
            )
            total = int(lengths[-1].sum())
            ids.append(torch.randint(0, limit, (total,), generator=self._generator))
        ranks = dist.get_world_size() if dist.is_initialized() else 1  # each has its own batches
        bags = KeyedJaggedTensor.from_lengths_sync(self._keys, torch.cat(ids), torch.cat(lengths))
        return Batch(
            sparse_features=bags,
            dense_features=torch.randn(self._rows, self._num_dense, generator=self._generator),
            labels=torch.randint(0, 2, (self._rows,), generator=self._generator).float(),
            global_rows=self._rows * ranks,
        )
