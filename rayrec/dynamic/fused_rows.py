"""`FusedRows`: ids of the steps to rows of several shards, found and counted in one pass.

In training `admit` is given all ids of a step, from all ranks: it counts them, admits, evicts, and
returns their rows. In evaluation `find` changes nothing.

The maps of the shards lie side by side, and so do their columns. Most ids of a step have a row: for
these a step costs one search and two writes each, however many tables there are. Those that have
none go on shard by shard (`DynamicRows.admit`).
"""

# N ids, S shards

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.comm.pages import Allocate, private_memory
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.columns import IdColumns, Ints
from rayrec.dynamic.id_map import ABSENT, IdMaps
from rayrec.dynamic.rows import Begin, DynamicRows
from rayrec.layout.dynamic import READ_ONLY
from rayrec.layout.geometry import Shard
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.sparse.ops import offsets_of


class FusedRows:
    """The ids of S shards of dynamic tables.

    Args:
        tables: table of each shard.
        seed: of first values and of the hash that admits a share of ids.
        begins: per shard, what writes first values into rows.
        allocate: gives memory for what is known of ids; what lies there is gone on with.
    Attributes:
        of_shards: the ids of each shard.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        seed: int,
        shards: Sequence[Shard],
        begins: Sequence[Begin],
        allocate: Allocate = private_memory,
    ) -> None:
        rows = [len(shard.rows) for shard in shards]
        self._seed, self._maps, self._firsts = seed, IdMaps(rows), offsets_of(rows)
        whole = IdColumns.lying_in(allocate, sum(rows), timed=False)
        self.of_shards: list[DynamicRows] = []
        for i, (table, shard, begin) in enumerate(zip(tables, shards, begins, strict=True)):
            assert table.dynamic is not None, "the tables are dynamic"
            columns = whole.part(self._firsts[i], self._firsts[i + 1])
            if table.dynamic.uses_time:
                columns = columns._replace(time=allocate(8 * rows[i]).view(torch.int64))
            ids = columns, self._maps.maps[i]
            self.of_shards.append(DynamicRows(table, seed, shard, begin, ids, allocate))
        self._aging = [(i, one) for i, one in enumerate(self.of_shards) if one.rule.has_ttl]
        self._timed = [one for one in self.of_shards if one.rule.uses_time]
        shared = {f"id_{name}" for name in whole.named()}
        self._written = [*whole.named().values()]
        for one in self.of_shards:
            self._written += [part for name, part in one.tensors().items() if name not in shared]
        self._version = -1

    def copy(self, begins: Sequence[Begin]) -> FusedRows:
        """Return the same ids for a copy of the rows, which `begins` write into."""
        old = self.of_shards
        shards = [one.shard for one in old]
        twin = FusedRows([one.table for one in old], self._seed, shards, begins)
        for new, one in zip(twin.of_shards, old, strict=True):
            new.copy_from(one)
        return twin

    def find(self, ids: Tensor, bounds: Sequence[int], now: Instant) -> Tensor:
        """Return (N,) int64 rows of (N,) ids in their shards, -1 for those unknown by now.

        Args:
            bounds: (S + 1,) where the ids of each shard begin, and N.
        """
        self._refresh()
        rows = self._find(np.ascontiguousarray(ids.cpu().numpy()), bounds, now)
        return torch.from_numpy(rows).to(ids.device)

    def admit(
        self, ids: Tensor, bounds: Sequence[int], now: Instant, lags: Tensor | None = None
    ) -> Tensor:
        """Count the (N,) ids of a step, admit and evict, and return their (N,) rows, or -1.

        Args:
            bounds: (S + 1,) where the ids of each shard begin, and N.
            now: a later step than at every call before.
            lags: (N,) of `DynamicConfig.lag`; ids that are `READ_ONLY` are found after all others,
                and change nothing.
        """
        self._refresh()
        for shard in self._timed:
            shard.begin_step(now)
        keys = np.ascontiguousarray(ids.cpu().numpy())
        if lags is None:
            rows = self._admit(keys, bounds, now, None)
        else:
            rows, known = np.empty(len(keys), np.int64), lags.cpu().numpy()
            only = known == READ_ONLY
            before = np.concatenate([[0], np.cumsum(only)])[list(bounds)]
            of_others = (np.array(bounds) - before).tolist()
            rows[~only] = self._admit(keys[~only], of_others, now, known[~only])
            rows[only] = self._find(keys[only], before.tolist(), now)
        is_complete = rows.min(initial=0) != ABSENT
        for shard, (start, stop) in zip(self.of_shards, pairwise(bounds), strict=True):
            shard.tally.looked_up += stop - start
            if not is_complete:
                shard.tally.unknown += int(np.count_nonzero(rows[start:stop] == ABSENT))
        return torch.from_numpy(rows).to(ids.device)

    def _refresh(self) -> None:
        """Make the maps anew where a restore or a move has written the columns."""
        # torch counts writes into a tensor and its views together
        version = sum(tensor._version for tensor in self._written)
        if version != self._version:
            for shard in self.of_shards:
                shard.refresh()
            self._version = version

    def _find(self, keys: Ints, bounds: Sequence[int], now: Instant) -> Ints:
        rows: Ints = self._maps.find(torch.from_numpy(keys), bounds)[0].numpy()
        rows[~self._fresh(rows, bounds, now)] = ABSENT
        return rows

    def _fresh(self, rows: Ints, bounds: Sequence[int], now: Instant) -> NDArray[np.bool_]:
        """Return (N,) which ids have a row, and were seen lately enough to be known."""
        known = rows != ABSENT
        for i, shard in self._aging:
            part = slice(bounds[i], bounds[i + 1])
            own = known[part]
            own[own] = shard.fresh(rows[part][own], now)
        return known

    def _admit(self, keys: Ints, bounds: Sequence[int], now: Instant, lags: Ints | None) -> Ints:
        """Count (N,) ids, admit and evict, and return their (N,) rows."""
        # most ids have a row, and are counted as often as they occur: to sort them costs more
        places, complete = self._maps.find(torch.from_numpy(keys), bounds)
        rows: Ints = places.numpy()
        fresh = None
        if self._aging or not complete:
            fresh = self._fresh(rows, bounds, now)
            fresh = None if fresh.all() else fresh
        for shard, (start, stop) in zip(self.of_shards, pairwise(bounds), strict=True):
            own, own_lags = rows[start:stop], None
            if lags is not None and shard.rule.feature_ttls:
                own_lags = lags[start:stop]
            if fresh is None:
                shard.count(own, now, own_lags)
                continue
            met = fresh[start:stop]
            shard.count(own[met], now, None if own_lags is None else own_lags[met])
            (others,) = np.nonzero(~met)
            if len(others):
                of_others = None if own_lags is None else own_lags[others]
                own[others] = shard.admit(keys[start:stop][others], own[others], now, of_others)
        for shard in self.of_shards if lags is not None else ():
            shard.settle(now)
        return rows
