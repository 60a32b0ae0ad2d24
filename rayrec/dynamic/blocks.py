"""`BlockedKeys`: which 64-bit keys have a place, in blocks of equally many places.

A key belongs to one block, by a hash. A key that is placed gets the lowest free place of its block.
Where a block has too few, an eighth of them all, or as many as are needed, are taken back at
once, those of keys whose time is over first, then those with the least score; so a block is sorted
once for many keys. A place that was given or asked for in this very step is not taken back. Ties
are broken by the hash of the key: nothing depends on the order in which keys come.

The columns are the whole state. `rebuild` makes the map and the free places anew from them.
A step costs one search of the map for every key, and two writes for each that has a place, all at
random places of memory, which therefore lies on huge pages.
"""

# N keys, P places

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rayrec.data.hashing import mix
from rayrec.dynamic.clock import NO_TIME, Instant
from rayrec.dynamic.columns import NO_KEY, IdColumns, Ints
from rayrec.dynamic.id_map import ABSENT, IdMap
from rayrec.dynamic.key_blocks import blocks_of
from rayrec.dynamic.sightings import Sightings, Stamps
from rayrec.errors import ConfigError
from rayrec.layout.dynamic import DynamicConfig

MOST_HITS = 2**31 - 1
LONG_AGO = Instant(0, 0)
CACHED = 4096  # places whose lines of memory stay in a core's cache between two writes
SHARE = 8  # of the places of a full block, one in so many is taken back
Touch = Callable[[Ints], None]


def no_touch(places: Ints) -> None:
    """Keep nothing of places that change."""


class Met(NamedTuple):
    """What is known of some keys.

    Attributes:
        places: (N,), `ABSENT` where a key has none. known: (N,), it has one.
        fresh: (N,), and was seen lately enough.
    """

    places: Ints
    known: NDArray[np.bool_]
    fresh: NDArray[np.bool_]


class Placed(NamedTuple):
    """The places that some keys got.

    Attributes:
        places: (N,), `ABSENT` where a key got none.
        freed: (M,) places that were taken back from other keys before.
    """

    places: Ints
    freed: Ints


class BlockedKeys:
    """The keys of some neighbouring blocks.

    Args:
        columns: of P places, changed in place.
        size: places of a block.
        most: those of them, the first ones, that keys get.
        blocks: number of blocks of the whole table, a power of two.
        first: the first of the blocks that are here.
        rule: says when time is over.
        eviction: see `DynamicConfig`.
        id_map: a map of the keys that there may be, whatever it holds.
    Attributes:
        touch: called with places whose columns are about to change; a place may repeat.
    """

    def __init__(
        self,
        columns: IdColumns,
        size: int,
        most: int,
        blocks: int,
        first: int,
        rule: DynamicConfig,
        eviction: str,
        id_map: IdMap,
    ) -> None:
        self._tensors, self._map = columns, id_map
        self._versioned = tuple(columns.named().values())
        self._key, self._seen, self._hits = (column.numpy() for column in columns[:3])
        self._counts = self._hits.view(np.uint32)  # so that a step cannot wrap one around
        self._time = None if columns.time is None else columns.time.numpy()
        self._size, self._most, self._blocks, self._first = size, most, blocks, first
        self._rule, self._eviction = rule, eviction
        self._stamps = Stamps(self._seen, self._seen if rule.ttl_s is None else self._time)
        self.touch: Touch = no_touch
        self.rebuild()

    def rebuild(self) -> None:
        """Make the map and the lists of free places anew, after the columns were written.

        Raises:
            ConfigError: a key lies in another block than its own.
        """
        self._map.clear()
        (live,) = np.nonzero(self._key != NO_KEY)
        own = blocks_of(self._key[live], self._blocks) - self._first
        if (own != live // self._size).any():
            raise ConfigError(
                f"rows of a dynamic table were saved with other blocks than {self._blocks} of "
                f"{self._size} rows; give DynamicConfig the `blocks` that the table had."
            )
        self._map.put(torch.from_numpy(self._key[live]), torch.from_numpy(live))
        # per block its free places, the lowest last
        self._free = np.zeros((len(self._key) // self._size, self._most), np.int32)
        self._frees = np.zeros(len(self._free), np.int64)
        for block in range(len(self._free)):
            self._fill_free(block)
        self._no_more_than = int(self._hits.max(initial=0))  # is any count
        self._untimed = np.zeros(0, np.int64)
        if self._time is not None:
            self._untimed = live[self._time[live] == NO_TIME]
        self._version = self._versions()

    def is_stale(self) -> bool:
        """Return True if the keys were written by somebody else since they were last looked at."""
        # torch counts writes into a tensor and its views; those through numpy, of this class, it
        # does not see
        return self._versions() != self._version

    def _versions(self) -> int:
        return sum(column._version for column in self._versioned)

    def find(self, keys: Ints) -> Ints:
        """Return (N,) places of (N,) keys, `ABSENT` where they have none."""
        return self._map.find(torch.from_numpy(keys)).numpy()

    def begin(self, now: Instant) -> None:
        """Let keys of which nobody knows the time have been seen at the first that data tells."""
        if self._time is not None and len(self._untimed) and now.time != NO_TIME:
            self.touch(self._untimed)
            self._time[self._untimed] = now.time
            self._untimed = self._untimed[:0]

    def meet(self, seen_now: Sightings, now: Instant) -> Met:
        """Find the keys of sightings, and count those that are not outlived.

        Their stamps become the later ones of now and before.
        """
        places, stamps = self.find(seen_now.keys), seen_now.stamps
        known = places != ABSENT
        fresh = known.copy()
        fresh[known] = self.fresh(places[known], now)
        seen = places[fresh]
        self.touch(seen)
        if stamps is not None:
            stamps[fresh] = self._stamps.later(seen, stamps[fresh])
            self._stamps.note(seen, stamps[fresh])
        self._see(seen, now)
        total = np.minimum(self._hits[seen] + seen_now.counts[fresh], MOST_HITS)
        self._hits[seen] = total
        self._no_more_than = max(self._no_more_than, int(total.max(initial=0)))
        return Met(places, known, fresh)

    def count(self, places: Ints, now: Instant, stamps: Ints | None) -> None:
        """Count keys that have (N,) places and are not outlived, each as often as it is there.

        Args:
            stamps: (N,) as in `Sightings`.
        """
        self.touch(places)
        if stamps is not None:
            self._stamps.note(places, self._stamps.later(places, stamps))
        if self._time is not None:
            self._time[places] = now.time
        for start in range(0, len(places), CACHED):
            part = places[start : start + CACHED]
            self._seen[part] = now.step
            np.add.at(self._counts, part, np.uint32(1))
        self._no_more_than += len(places)
        if self._no_more_than > MOST_HITS:  # to look at them all takes time
            self._counts[places] = np.minimum(self._counts[places], MOST_HITS)

    def fresh(self, places: Ints | slice, now: Instant) -> NDArray[np.bool_]:
        """Return (N,) whether the keys of some places were seen lately enough to be known."""
        seen = self._seen[places]
        if not self._rule.has_ttl:
            return np.ones(len(seen), bool)
        time = None if self._time is None else self._time[places]
        fresh: NDArray[np.bool_] = now.is_fresh(self._rule, seen, time)
        return fresh

    def held(self, now: Instant, least: int = 0) -> int:
        """Return the number of keys that are known by now, and were seen so often at least."""
        counted = (self._key != NO_KEY) & (self._hits >= least)
        if self._rule.has_ttl:
            counted &= self.fresh(slice(None), now)
        return int(np.count_nonzero(counted))

    def hits(self, places: Ints) -> NDArray[np.int32]:
        """Return (N,) how often the keys of some places were seen."""
        return self._hits[places]

    def settle(self, now: Instant) -> None:
        """End a step in which keys were given stamps that lie before it."""
        self._stamps.settle(now.step)

    def restart(self, places: Ints, now: Instant, seen_now: Sightings) -> None:
        """Begin the counts of some places anew with sightings of their keys."""
        self.touch(places)
        if seen_now.stamps is not None:
            self._stamps.note(places, seen_now.stamps)
        self._see(places, now)
        self._hits[places] = np.minimum(seen_now.counts, MOST_HITS)
        self._no_more_than = max(self._no_more_than, int(seen_now.counts.max(initial=0)))

    def _see(self, places: Ints, now: Instant) -> None:
        self._seen[places] = now.step
        if self._time is not None:
            self._time[places] = now.time

    def place(self, seen_now: Sightings, now: Instant) -> Placed:
        """Give places to the keys of sightings, which have none, in the order of their counts."""
        keys, counts, _ = seen_now
        places = np.full(len(keys), ABSENT, np.int64)
        if not len(keys):
            return Placed(places, np.zeros(0, np.int64))
        blocks = blocks_of(keys, self._blocks) - self._first
        order = np.lexsort((mix(keys.view(np.uint64)), -counts, blocks))
        sorted_blocks = blocks[order]
        here, firsts, wanted = np.unique(sorted_blocks, return_index=True, return_counts=True)
        freed = [
            self._evict(block, count, now)
            for block, count in zip(here.tolist(), wanted.tolist(), strict=True)
            if count > self._frees[block]
        ]
        ranks = np.arange(len(keys)) - np.repeat(firsts, wanted)
        fits = ranks < self._frees[sorted_blocks]
        blocks_in, ranks_in, taken = sorted_blocks[fits], ranks[fits], order[fits]
        at = self._frees[blocks_in] - 1 - ranks_in
        places[taken] = self._free[blocks_in, at] + blocks_in * self._size
        self._frees[here] -= np.minimum(wanted, self._frees[here])
        given = places[taken]
        self.touch(given)
        self._key[given] = keys[taken]
        self.restart(given, now, seen_now.of(taken))
        self._map.put(torch.from_numpy(keys[taken]), torch.from_numpy(given))
        return Placed(places, np.concatenate([np.zeros(0, np.int64), *freed]))

    def _evict(self, block: int, wanted: int, now: Instant) -> Ints:
        """Take places of a block back, so that `wanted` are free where that can be.

        Returns:
            (M,) places that were taken back.
        """
        own = slice(block * self._size, (block + 1) * self._size)
        key, seen = self._key[own], self._seen[own]
        fresh = self.fresh(own, now)
        goes = ~fresh if self._eviction == "none" else seen < now.step
        (may_go,) = np.nonzero((key != NO_KEY) & goes)
        missing = wanted - int(self._frees[block])
        if not len(may_go):
            return may_go
        number = min(len(may_go), max(missing, self._most // SHARE))
        # the last key of a sort is the first that it compares
        score = *(one[own] for one in self._tensors.score(self._eviction)), fresh
        hashed = mix(key[may_go].view(np.uint64))
        least = np.lexsort((hashed, *(one[may_go] for one in score)))[:number]
        going = may_go[least]
        self.touch(going + own.start)
        self._map.drop(torch.from_numpy(key[going]))
        key[going] = NO_KEY
        self._see(going + own.start, LONG_AGO)
        self._hits[going + own.start] = 0
        self._fill_free(block)
        return going + block * self._size

    def _fill_free(self, block: int) -> None:
        first = block * self._size
        (free,) = np.nonzero(self._key[first : first + self._most] == NO_KEY)
        self._frees[block] = len(free)
        self._free[block, : len(free)] = free[::-1]
