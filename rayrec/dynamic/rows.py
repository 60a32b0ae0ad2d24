"""`DynamicRows`: ids of the steps to rows of one shard of a dynamic table.

`FusedRows` finds and counts the ids of a step that have a row, of all shards of a kernel at once.
Here the others are counted and admitted, and rows are taken back for them. Who has a row then is a
function of the ids of all steps, of the table's settings and of the seed alone.
"""

# N ids, R rows of the shard, D columns of the shard

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, asdict, dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.comm.pages import Allocate, private_memory
from rayrec.data.hashing import mix, mix_int
from rayrec.dynamic.blocks import BlockedKeys, Touch
from rayrec.dynamic.clock import NEVER, Instant
from rayrec.dynamic.columns import NO_KEY, IdColumns, Ints
from rayrec.dynamic.first_values import first_values
from rayrec.dynamic.id_map import ABSENT, IdMap
from rayrec.dynamic.kinds import kinds_of
from rayrec.dynamic.sightings import Sightings
from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.geometry import Shard
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.state import ShardState

Begin = Callable[[Tensor, Tensor], None]  # (rows, their first values): a row gets a new id
OfIds = tuple[IdColumns, IdMap]


def id_columns(table: BaseEmbeddingConfig) -> dict[str, torch.dtype]:
    """Return the columns of `DynamicRows.tensors` of a table with their types; {} of others."""
    if table.dynamic is None:
        return {}
    empty = IdColumns.lying_in(private_memory, 0, table.dynamic.uses_time)
    of_kinds = [empty.in_lanes(kind.name, kind.lanes) for kind in kinds_of(table)]
    return {name: column.dtype for columns in of_kinds for name, column in columns.items()}


def _touch_rows(touch: Touch, lanes: int, places: Ints) -> None:
    """Touch the rows of places, of which a row has one in each lane."""
    touch(places // lanes)


def rows_of(state: ShardState) -> Begin:
    """Return how a row of a shard begins: first values, and a state of its optimizer of zeros."""

    def begin(rows: Tensor, values: Tensor) -> None:
        state.weight[rows] = values.to(state.weight)
        for tensor in state.optimizer.values():
            tensor[rows] = 0

    return begin


@dataclass(slots=True)
class Tally:
    """What happened to the ids of a shard in training, since it was last told.

    Attributes:
        admitted: rows that were given to ids.
        evicted: rows that were taken back.
        refused: times that an id was to get a row, and its block had none to give.
        looked_up: ids of all bags, those of read-only features as well.
        unknown: those of them that had no row.
    """

    admitted: int = 0
    evicted: int = 0
    refused: int = 0
    looked_up: int = 0
    unknown: int = 0


@dataclass(slots=True)
class DynamicRows:
    """The ids of one shard of a dynamic table.

    Attributes:
        table: the table, with its settings.
        seed: of first values and of the hash that admits a share of ids.
        shard: rows between borders of blocks.
        begin: writes first values into rows, and clears the state of their optimizer.
        ids: columns and a map for the ids that have a row.
        allocate: gives memory for the columns of candidates; what lies there is gone on with.
        tally: what happened since `take_counts`.
    """

    table: BaseEmbeddingConfig
    seed: int
    shard: Shard
    begin: Begin
    ids: InitVar[OfIds]
    allocate: InitVar[Allocate]
    tally: Tally = field(default_factory=Tally)
    _columns: dict[str, IdColumns] = field(default_factory=dict)
    _lanes: dict[str, int] = field(default_factory=dict)
    _keys: dict[str, BlockedKeys] = field(default_factory=dict)

    def __post_init__(self, ids: OfIds, allocate: Allocate) -> None:
        rule = self.rule
        size = self.table.row_multiple
        blocks, first = self.table.num_embeddings // size, self.shard.rows.start // size
        for kind in kinds_of(self.table):
            columns, id_map = ids
            if kind.name != "id":
                rows = len(self.shard.rows)
                columns = IdColumns.lying_in(allocate, rows * kind.lanes, rule.uses_time)
                id_map = IdMap(rows // size * kind.most)
            self._columns[kind.name], self._lanes[kind.name] = columns, kind.lanes
            places = size * kind.lanes, kind.most, blocks, first
            self._keys[kind.name] = BlockedKeys(columns, *places, rule, kind.eviction, id_map)

    def copy_from(self, other: DynamicRows) -> None:
        """Know the same ids as the rows of which these are a copy."""
        self.tally = replace(other.tally)
        for name, column in self.tensors().items():
            column.copy_(other.tensors()[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return (R,) columns of the rows, live, for who saves, restores or moves them."""
        of_kinds = [
            columns.in_lanes(name, self._lanes[name]) for name, columns in self._columns.items()
        ]
        return {name: tensor for columns in of_kinds for name, tensor in columns.items()}

    def call_before(self, touch: Touch) -> None:
        """Have a function called with rows, maybe twice, whose columns or values will change.

        Of a row that is looked up and known only its columns change here.
        """
        for name, keys in self._keys.items():
            lanes = self._lanes[name]
            keys.touch = touch if lanes == 1 else partial(_touch_rows, touch, lanes)

    def take_counts(self, now: Instant) -> dict[str, int]:
        """Return how many ids have a row by now ("held"), how many are "candidates", and the
        numbers of the tally, which begins anew.
        """
        self.refresh()
        # a candidate that got a row keeps its place for a while, with a count of none
        held = {name: keys.held(now, int(name != "id")) for name, keys in self._keys.items()}
        counts = {"held": held["id"], "candidates": held.get("candidate", 0), **asdict(self.tally)}
        self.tally = Tally()
        return counts

    def held(self, now: Instant) -> int:
        """Return how many ids have a row by now."""
        self.refresh()
        return self._keys["id"].held(now)

    def see_all(self, now: Instant) -> None:
        """Let all ids that have a row have been seen last by now."""
        columns = self._columns["id"]
        columns.seen[columns.key != NO_KEY] = now.step
        self.time_all(now)

    def time_all(self, now: Instant) -> None:
        """Let ids and candidates of which no time was saved have been seen at the time of now."""
        for columns in self._columns.values():
            if columns.time is not None:
                columns.time[columns.key != NO_KEY] = now.time

    def begin_step(self, now: Instant) -> None:
        """Begin a step that trains, later than every one before, of a table that uses time."""
        for known in self._keys.values():
            known.begin(now)

    def fresh(self, rows: Ints, now: Instant) -> NDArray[np.bool_]:
        """Return (N,) whether the ids of some rows were seen lately enough to be known."""
        return self._keys["id"].fresh(rows, now)

    def count(self, rows: Ints, now: Instant, lags: Ints | None) -> None:
        """Count the ids of (N,) rows, which are known; see `BlockedKeys.count`.

        Args:
            lags: (N,) of their features.
        """
        stamps = None if lags is None else now.earlier(self.rule, lags)
        self._keys["id"].count(rows, now, stamps)

    def settle(self, now: Instant) -> None:
        """End a step in which ids had lags."""
        for keys in self._keys.values():
            keys.settle(now)

    def admit(self, keys: Ints, old_rows: Ints, now: Instant, lags: Ints | None) -> Ints:
        """Return rows of (N,) ids that are unknown and may be there several times; -1 for those
        that get none.

        Args:
            old_rows: (N,) rows of ids that are outlived; -1 for others.
            lags: (N,) of their features.
        """
        stamps = None if lags is None else now.earlier(self.rule, lags)
        ids, inverse = Sightings.counted(keys, stamps)
        # an id that comes back after its time is a new one, which has its old row at hand
        olds = np.empty(len(ids.keys), np.int64)
        olds[inverse] = old_rows
        rows: Ints = self._admit(ids, olds, now)[inverse]
        return rows

    def _admit(self, ids: Sightings, old_rows: Ints, now: Instant) -> Ints:
        """Return (N,) rows of ids without a row, or with an outlived one in `old_rows`."""
        keys, rows = ids.keys, np.full(len(ids.keys), ABSENT, np.int64)
        (wanted,) = np.nonzero(self._may_enter(keys))
        wanted = wanted[self._have_waited(ids, wanted, now)]
        outlived = wanted[old_rows[wanted] != ABSENT]
        rows[outlived] = old_rows[outlived]
        self._keys["id"].restart(rows[outlived], now, ids.of(outlived))
        new = wanted[old_rows[wanted] == ABSENT]
        rows[new], freed = self._keys["id"].place(ids.of(new), now)
        (given,) = np.nonzero(rows != ABSENT)
        refused = new[rows[new] == ABSENT]
        self.tally.admitted += len(given)
        self.tally.evicted += len(freed)
        self.tally.refused += len(refused)
        self._wait_on(ids.of(refused), now)
        if len(given):
            self._wait_no_more(keys[given])
            values = first_values(self.seed, self.table, keys[given], self.shard.cols)
            self.begin(torch.from_numpy(rows[given]), values)
        return rows

    def _have_waited(self, ids: Sightings, chosen: Ints, now: Instant) -> NDArray[np.bool_]:
        """Count the chosen ids as candidates; return which of them have been seen often enough.

        The stamps of `ids` become those of the candidates.
        """
        threshold, mine = self.rule.admission_threshold, ids.of(chosen)
        if threshold == 1:
            return np.ones(len(chosen), bool)
        candidates = self._keys["candidate"]
        places, known, fresh = candidates.meet(mine, now)
        if ids.stamps is not None and mine.stamps is not None:
            ids.stamps[chosen] = mine.stamps
        outlived = known & ~fresh
        candidates.restart(places[outlived], now, mine.of(outlived))
        total = mine.counts.copy()
        total[known] = candidates.hits(places[known])
        enough: NDArray[np.bool_] = total >= threshold
        new = ~known & ~enough
        candidates.place(mine.of(new), now)
        return enough

    def _wait_on(self, ids: Sightings, now: Instant) -> None:
        """Keep the counts of ids that were seen often enough and got no row."""
        if "candidate" in self._keys and len(ids.keys):
            new = self._keys["candidate"].find(ids.keys) == ABSENT
            self._keys["candidate"].place(ids.of(new), now)

    def _wait_no_more(self, keys: Ints) -> None:
        """Let the places of candidates that got a row go first when room is needed."""
        if "candidate" in self._keys:
            places = self._keys["candidate"].find(keys)
            places = places[places != ABSENT]
            none = Sightings(keys[:0], np.zeros(len(places), np.int64))
            self._keys["candidate"].restart(places, NEVER, none)

    def _may_enter(self, keys: Ints) -> NDArray[np.bool_]:
        """Return (N,) which ids a hash of seed and id lets in."""
        share = self.rule.admission_probability
        if share == 1.0:
            return np.ones(len(keys), bool)
        salt = np.uint64(mix_int(self.seed, 1))
        drawn = mix(keys.view(np.uint64) ^ salt) >> np.uint64(11)
        return drawn < np.uint64(int(share * 2**53))

    @property
    def rule(self) -> DynamicConfig:
        """The rules of the table."""
        assert self.table.dynamic is not None, "the table is dynamic"
        return self.table.dynamic

    def refresh(self) -> None:
        """Make the maps anew where a restore or a move has written the columns."""
        for keys in self._keys.values():
            if keys.is_stale():
                keys.rebuild()
