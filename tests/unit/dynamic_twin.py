"""A dynamic table in plain Python, by the rules as the documents say them, and ids that drift."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rayrec.data.hashing import mix, mix_int
from rayrec.dynamic.key_blocks import blocks_of
from rayrec.layout import BaseEmbeddingConfig, DynamicConfig

SEED = 5


def mixed(number: int) -> int:
    return int(mix(np.array([number], np.int64).view(np.uint64))[0])


NEVER = 2**63  # the end of an id that does not grow old


@dataclass
class Known:
    """An id with a place: in which step it was last seen, how often, and at which time; and the
    last step, or time, in which it is known.
    """

    seen: int
    count: int
    time: int
    end: int


@dataclass
class Place:
    """The ids of one block, in dicts."""

    size: int
    eviction: str
    rule: DynamicConfig
    ids: dict[int, Known] = field(default_factory=dict)

    def is_known(self, one: int, step: int, time: int) -> bool:
        known = self.ids.get(one)
        return known is not None and known.end >= (time if self.rule.ttl_s else step)

    def stamps(self, one: int) -> tuple[int, int]:
        """The step and the time in which an id counts as seen: its end less the table's ttl."""
        known, rule = self.ids[one], self.rule
        if rule.ttl_s is not None:
            return known.seen, known.end - rule.ttl_s
        return known.seen if rule.ttl_steps is None else known.end - rule.ttl_steps, known.time

    def put(
        self, wanted: dict[int, int], step: int, time: int, ends: dict[int, int]
    ) -> tuple[list[int], int]:
        """Place ids; returns those that got a place, and how many lost theirs."""
        evicted = 0
        missing = len(wanted) - (self.size - len(self.ids))
        if missing > 0:
            may_go = [one for one, known in self.ids.items() if known.seen < step]
            if self.eviction == "none":
                may_go = [one for one in may_go if not self.is_known(one, step, time)]

            def score(one: int) -> tuple[bool, int, int, int]:
                known, (seen, at) = self.ids[one], self.stamps(one)
                first, second = {"lfu": (known.count, seen), "timestamp": (at, known.count)}.get(
                    self.eviction, (seen, known.count)
                )
                return self.is_known(one, step, time), first, second, mixed(one)

            for one in sorted(may_go, key=score)[: max(missing, self.size // 8)]:
                del self.ids[one]
                evicted += 1
        order = sorted(wanted, key=lambda one: (-wanted[one], mixed(one)))
        placed = order[: self.size - len(self.ids)]
        for one in placed:
            self.ids[one] = Known(step, wanted[one], time, ends[one])
        return placed, evicted


class Twin:
    """A whole dynamic table in plain Python.

    Args:
        seed: of the hash that admits a share of ids.
    """

    def __init__(self, table: BaseEmbeddingConfig, seed: int = SEED) -> None:
        assert table.dynamic is not None
        self.rule, self.size, self.seed = table.dynamic, table.row_multiple, seed
        self.blocks = table.num_embeddings // self.size
        rule = self.rule
        self.rows = [Place(self.size, rule.eviction, rule) for _ in range(self.blocks)]
        capacity = rule.counter_capacity
        share = self.size if capacity is None else capacity // self.blocks
        self.waiting = [Place(share, "step", rule) for _ in range(self.blocks)]
        self.counts: Counter[str] = Counter()
        self.time = -1

    def is_known(self, one: int, step: int) -> bool:
        return self.rows[self._block(one)].is_known(one, step, self.time)

    def step(self, ids: list[int], step: int, time: int, features: list[str] | None = None) -> None:
        """Train on ids, each of a feature."""
        self.time = max(self.time, time)
        counts = Counter(ids)
        ends = dict.fromkeys(counts, -NEVER)
        for one, feature in zip(ids, features or ["f"] * len(ids), strict=True):
            ends[one] = max(ends[one], self._end(feature, step))
        for one, count in counts.items():
            if self.is_known(one, step):
                known = self.rows[self._block(one)].ids[one]
                known.seen, known.count, known.time = step, known.count + count, self.time
                known.end = max(known.end, ends[one])
        for block in range(self.blocks):
            here = {one: n for one, n in counts.items() if self._block(one) == block}
            others = {o: n for o, n in here.items() if not self._seen_now(o, step)}
            self._admit(block, others, step, ends)

    def _end(self, feature: str, step: int) -> int:
        """Until when an id is known that a feature sees."""
        rule = self.rule
        if rule.ttl_s is not None:
            end = self.time + (rule.feature_ttl_s or {}).get(feature, rule.ttl_s)
            # as if it had been seen so much earlier, but not at -1, which stands for no time
            return end - (end - rule.ttl_s == -1)
        if rule.ttl_steps is not None:
            return step + (rule.feature_ttl_steps or {}).get(feature, rule.ttl_steps)
        return NEVER

    def grow(self, step: int) -> bool:
        """Double the rows if most of them are in use, and the candidates if they are as many."""
        growth = self.rule.growth
        assert growth is not None
        rows, held = self.size * self.blocks, self.told(step)["held"]
        if held <= growth.max_load_factor * rows or 2 * rows > growth.max_num_embeddings:
            return False
        self.size *= 2
        for place in (*self.rows, *self.waiting):
            if place in self.rows or self.rule.counter_capacity is None:
                place.size = self.size
            # ids whose time is over leave on the way
            place.ids = {o: k for o, k in place.ids.items() if place.is_known(o, step, self.time)}
        return True

    def told(self, step: int) -> dict[str, int]:
        """The counts so far, and of the moment."""
        waiting = [
            one
            for place in self.waiting
            for one, known in place.ids.items()
            if known.count and place.is_known(one, step, self.time)
        ]
        held = [one for place in self.rows for one in place.ids if self.is_known(one, step)]
        return {**self.counts, "held": len(held), "candidates": len(waiting)}

    def _seen_now(self, one: int, step: int) -> bool:
        known = self.rows[self._block(one)].ids.get(one)
        return known is not None and known.seen == step

    def _admit(self, block: int, counts: dict[int, int], step: int, ends: dict[int, int]) -> None:
        rows, waiting, time = self.rows[block], self.waiting[block], self.time
        enter = {one: n for one, n in counts.items() if self._may_enter(one)}
        threshold = self.rule.admission_threshold
        if threshold > 1:
            fresh = {}
            enough = {}
            for one, count in enter.items():
                known = waiting.ids.get(one)
                if known is not None:
                    before = known.count if waiting.is_known(one, step, time) else 0
                    known.seen, known.count, known.time = step, before + count, time
                    # a candidate takes its end along to its row
                    known.end = ends[one] = max(known.end, ends[one])
                total = count if known is None else known.count
                if total >= threshold:
                    enough[one] = count
                elif known is None:
                    fresh[one] = count
            waiting.put(fresh, step, time, ends)
            enter = enough
        outlived = {one: n for one, n in enter.items() if one in rows.ids}
        for one, count in outlived.items():
            rows.ids[one] = Known(step, count, time, ends[one])
        new = {one: n for one, n in enter.items() if one not in outlived}
        placed, evicted = rows.put(new, step, time, ends)
        refused = enter.keys() - outlived.keys() - set(placed)
        self.counts["admitted"] += len(placed) + len(outlived)
        self.counts["evicted"] += evicted
        self.counts["refused"] += len(refused)
        if threshold > 1:
            waiting.put({o: enter[o] for o in refused if o not in waiting.ids}, step, time, ends)
        for one in [*placed, *outlived]:
            if one in waiting.ids:
                # as if it had never been seen, for whoever needs its place
                ttl = self.rule.ttl_s or self.rule.ttl_steps
                end = NEVER if ttl is None else ttl - 2**31
                waiting.ids[one] = Known(-(2**31), 0, -(2**31), end)

    def _may_enter(self, one: int) -> bool:
        salted = (one & (2**64 - 1)) ^ mix_int(self.seed, 1)
        drawn = int(mix(np.array([salted], np.uint64))[0]) >> 11
        return drawn < int(self.rule.admission_probability * 2**53)

    def _block(self, one: int) -> int:
        return int(blocks_of(np.array([one], np.int64), self.blocks)[0])


def drifting(rng: random.Random, steps: int) -> list[list[int]]:
    """Ids of some steps: a window of favourites moves over all numbers of 64 bits."""
    names = [rng.randint(-(2**63), 2**63 - 1) for _ in range(400)]
    names = [one for one in names if one != -1] + [0, 1, 2**63 - 1, -(2**63)]
    found = []
    for step in range(steps):
        first = step * 2
        window = names[first : first + rng.randint(5, 120)] or names
        found.append([rng.choice(window) for _ in range(rng.randint(0, 60))])
    return found


def wandering(rng: random.Random, steps: int) -> list[int]:
    """Times of some steps, in seconds, that go on in bounds and leaps, and at times back."""
    now, found = rng.choice([0, 1_700_000_000, 253_402_200_000]), []
    for _ in range(steps):
        now = max(0, now + rng.choice([0, 1, 5, 30, 400, -20, -1000]))
        found.append(now)
    return found
