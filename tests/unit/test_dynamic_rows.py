"""Rows of dynamic tables against a twin in plain Python, and cut into any shards."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rayrec.comm.pages import private_memory
from rayrec.data import FeatureSchema
from rayrec.data.hashing import mix
from rayrec.dynamic.blocks import blocks_of
from rayrec.dynamic.first_values import first_values
from rayrec.dynamic.rows import DynamicRows
from rayrec.errors import ConfigError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, Shard
from rayrec.modules import EmbeddingBagCollection

SEED = 5


def mixed(number: int) -> int:
    return int(mix(np.array([number], np.int64).view(np.uint64))[0])


@dataclass
class Known:
    """An id with a place: when it was last seen, and how often."""

    seen: int
    count: int


@dataclass
class Place:
    """The ids of one block by the rules as the documents say them, in dicts."""

    size: int
    eviction: str
    ttl: int | None
    ids: dict[int, Known] = field(default_factory=dict)

    def is_known(self, one: int, step: int) -> bool:
        known = self.ids.get(one)
        return known is not None and (self.ttl is None or known.seen + self.ttl >= step)

    def put(self, wanted: dict[int, int], step: int) -> tuple[list[int], int]:
        """Place ids; returns those that got a place, and how many lost theirs."""
        evicted = 0
        missing = len(wanted) - (self.size - len(self.ids))
        if missing > 0:
            may_go = [one for one, known in self.ids.items() if known.seen < step]
            if self.eviction == "none":
                may_go = [one for one in may_go if not self.is_known(one, step)]

            def score(one: int) -> tuple[bool, int, int, int]:
                known = self.ids[one]
                first, second = known.seen, known.count
                if self.eviction == "lfu":
                    first, second = second, first
                return self.is_known(one, step), first, second, mixed(one)

            for one in sorted(may_go, key=score)[: max(missing, self.size // 8)]:
                del self.ids[one]
                evicted += 1
        order = sorted(wanted, key=lambda one: (-wanted[one], mixed(one)))
        placed = order[: self.size - len(self.ids)]
        for one in placed:
            self.ids[one] = Known(step, wanted[one])
        return placed, evicted


class Twin:
    """A whole dynamic table in plain Python."""

    def __init__(self, table: EmbeddingBagConfig) -> None:
        assert table.dynamic is not None
        self.rule, self.size = table.dynamic, table.row_multiple
        self.blocks = table.num_embeddings // self.size
        ttl = self.rule.ttl_steps
        self.rows = [Place(self.size, self.rule.eviction, ttl) for _ in range(self.blocks)]
        self.waiting = [Place(self.size, "step", ttl) for _ in range(self.blocks)]

    def is_known(self, one: int, step: int) -> bool:
        return self.rows[self._block(one)].is_known(one, step)

    def step(self, ids: list[int], step: int) -> None:
        counts = Counter(ids)
        for one, count in counts.items():
            if self.is_known(one, step):
                known = self.rows[self._block(one)].ids[one]
                known.seen, known.count = step, known.count + count
        for block in range(self.blocks):
            here = {one: n for one, n in counts.items() if self._block(one) == block}
            self._admit(block, {o: n for o, n in here.items() if not self._seen_now(o, step)}, step)

    def _seen_now(self, one: int, step: int) -> bool:
        known = self.rows[self._block(one)].ids.get(one)
        return known is not None and known.seen == step

    def _admit(self, block: int, counts: dict[int, int], step: int) -> None:
        rows, waiting = self.rows[block], self.waiting[block]
        enter = {one: n for one, n in counts.items() if self._may_enter(one)}
        threshold = self.rule.admission_threshold
        if threshold > 1:
            fresh = {}
            enough = {}
            for one, count in enter.items():
                known = waiting.ids.get(one)
                if known is not None:
                    before = known.count if waiting.is_known(one, step) else 0
                    known.seen, known.count = step, before + count
                total = count if known is None else known.count
                if total >= threshold:
                    enough[one] = count
                elif known is None:
                    fresh[one] = count
            waiting.put(fresh, step)
            enter = enough
        outlived = {one: n for one, n in enter.items() if one in rows.ids}
        for one, count in outlived.items():
            rows.ids[one] = Known(step, count)
        placed, _ = rows.put({o: n for o, n in enter.items() if o not in outlived}, step)
        refused = enter.keys() - outlived.keys() - set(placed)
        if threshold > 1:
            waiting.put({o: enter[o] for o in refused if o not in waiting.ids}, step)
        for one in [*placed, *outlived]:
            if one in waiting.ids:
                waiting.ids[one] = Known(0, 0)

    def _may_enter(self, one: int) -> bool:
        from rayrec.data.hashing import mix_int

        salted = (one & (2**64 - 1)) ^ mix_int(SEED, 1)
        drawn = int(mix(np.array([salted], np.uint64))[0]) >> 11
        return drawn < int(self.rule.admission_probability * 2**53)

    def _block(self, one: int) -> int:
        return int(blocks_of(np.array([one], np.int64), self.blocks)[0])


def shards_of(table: EmbeddingBagConfig, cuts: list[int]) -> list[tuple[DynamicRows, Tensor]]:
    """The table as shards with row cuts, each with the values of its rows."""
    found = []
    for start, stop in pairwise(cuts):
        values = torch.zeros(stop - start, table.embedding_dim)

        def begin(rows: Tensor, first: Tensor, values: Tensor = values) -> None:
            values[rows] = first

        shard = Shard("t", range(start, stop), range(table.embedding_dim), 0)
        found.append((DynamicRows(table, SEED, shard, begin), values))
    return found


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


@pytest.mark.seeds(range(60))
def test_rows_come_and_go_as_in_plain_python_whatever_the_cuts(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.choice([1, 2, 4, 8])
    rule = DynamicConfig(
        admission_threshold=rng.choice([1, 1, 2, 4]),
        admission_probability=rng.choice([1.0, 1.0, 0.6]),
        eviction=rng.choice(["step", "lfu", "none"]),
        ttl_steps=rng.choice([None, 3, 20]),
        blocks=blocks,
    )
    table = EmbeddingBagConfig(blocks * rng.choice([3, 8, 20]), 4, "t", dynamic=rule)
    inner = [table.row_multiple * i for i in range(1, blocks) if rng.random() < 0.5]
    parts = shards_of(table, [0, *inner, table.num_embeddings])
    twin = Twin(table)
    read_only = rng.choice([0.0, 0.3])  # share of ids that come by features that admit none
    for step, ids in enumerate(drifting(rng, 60), start=1):
        # ids arrive in another order on other plans
        shuffled = rng.sample(ids, len(ids))
        only = [rng.random() < read_only for _ in shuffled]
        twin.step([one for one, is_only in zip(shuffled, only, strict=True) if not is_only], step)
        for part, _ in parts:
            low, high = part.shard.rows.start, part.shard.rows.stop
            in_block = blocks_of(np.array(shuffled, np.int64), blocks) * table.row_multiple
            mine = [low <= at < high for at in in_block]
            own, own_only = list(compress(shuffled, mine)), list(compress(only, mine))
            rows = part.admit(
                torch.tensor(own, dtype=torch.int64),
                step,
                torch.tensor(own_only, dtype=torch.bool) if read_only else None,
            )
            for one, row in zip(own, rows.tolist(), strict=True):
                assert (row >= 0) == twin.is_known(one, step), (step, one)
            known = sorted({row for row in rows.tolist() if row >= 0})
            assert len(known) == len({o for o in own if twin.is_known(o, step)}), "one row each"
            if rng.random() < 0.1:  # as a restore does it
                kept = {name: column.clone() for name, column in part.tensors().items()}
                part.__post_init__(private_memory)
                for name, column in part.tensors().items():
                    column.copy_(kept[name])
    held = {}
    for part, values in parts:
        columns = part.tensors()
        for row, one in enumerate(columns["id_key"].tolist()):
            if one != -1:
                held[one] = (columns["id_seen"][row].item(), columns["id_hits"][row].item())
                found = part.find(torch.tensor([one]), 60).item()
                assert found == (row if twin.is_known(one, 60) else -1)
                first = first_values(SEED, table, np.array([one]), range(4))[0]
                assert torch.equal(values[row], first)
    wanted = {o: (k.seen, k.count) for place in twin.rows for o, k in place.ids.items()}
    assert held == wanted


def test_counts_stop_at_the_largest_that_a_column_holds() -> None:
    table = EmbeddingBagConfig(4, 4, "t", dynamic=DynamicConfig(blocks=1))
    ((part, _),) = shards_of(table, [0, 4])
    part.admit(torch.tensor([7, 8]), 1)
    kept = {name: column.clone() for name, column in part.tensors().items()}
    kept["id_hits"] = torch.where(kept["id_key"] == 7, 2**31 - 3, kept["id_hits"])
    for name, column in part.tensors().items():
        column.copy_(kept[name])
    for step in (2, 3):
        part.admit(torch.tensor([7, 8, 7, 7]), step)
        found = dict(zip(part.tensors()["id_key"].tolist(), part.tensors()["id_hits"], strict=True))
        assert (found[7], found[8]) == (2**31 - 1, step)


def test_first_values_are_of_the_id_and_within_bounds() -> None:
    table = EmbeddingBagConfig(
        8, 8, "t", weight_init_min=-0.25, weight_init_max=0.5, dynamic=DynamicConfig()
    )
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    whole = first_values(1, table, ids, range(8))
    assert torch.equal(whole[7:9, 2:5], first_values(1, table, ids[7:9], range(2, 5)))
    assert -0.25 <= whole.min() < -0.249 and 0.499 < whole.max() <= 0.5
    assert abs(whole.mean() - 0.125) < 0.005
    assert not torch.equal(whole, first_values(2, table, ids, range(8)))


def test_blocks_fill_alike() -> None:
    ids = np.arange(1 << 16)
    counts = np.bincount(blocks_of(ids, 16))
    assert len(counts) == 16 and counts.min() > 0.95 * 4096 and counts.max() < 1.05 * 4096


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"admission_threshold": 0}, "admission_threshold=0"),
        ({"admission_probability": 0.0}, "admission_probability=0.0"),
        ({"ttl_steps": 0}, "ttl_steps=0"),
        ({"blocks": 3}, "blocks=3; it must be a power of two"),
        ({"eviction": "random"}, "eviction"),
        ({"read_only_features": "negatives"}, "read_only_features"),
    ],
)
def test_rules_out_of_range_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DynamicConfig(**options)  # type: ignore[arg-type]


def test_read_only_features_are_features_of_the_table() -> None:
    text = """{"label": "click", "features": [{"name": "item", "column": "item"}], "tables": [
        {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "features": ["item"],
         "dynamic": {"read_only_features": ["%s"]}}]}"""
    (table,) = FeatureSchema.from_json(text % "item").tables
    assert table.dynamic == DynamicConfig(read_only_features=("item",))
    schema = FeatureSchema.from_json(text % "item")
    assert FeatureSchema.from_json(schema.to_json()) == schema
    with pytest.raises(ConfigError, match="table 't' has 'negatives' among read_only_features"):
        FeatureSchema.from_json(text % "negatives")
    rule = DynamicConfig(read_only_features=("negatives",))
    wrong = EmbeddingBagConfig(8, 4, "t", feature_names=["item"], dynamic=rule)
    with pytest.raises(ConfigError, match="'negatives' among read_only_features"):
        EmbeddingBagCollection(tables=[wrong], device="meta")


def test_blocks_divide_the_rows() -> None:
    assert EmbeddingBagConfig(1 << 20, 4, "t", dynamic=DynamicConfig()).row_multiple == 4096
    assert EmbeddingBagConfig(10_007, 4, "t", dynamic=DynamicConfig()).row_multiple == 10_007
    with pytest.raises(ConfigError, match="blocks=4, which does not divide num_embeddings=10"):
        EmbeddingBagConfig(10, 4, "t", dynamic=DynamicConfig(blocks=4))
    with pytest.raises(ConfigError, match="init_fn and dynamic"):
        EmbeddingBagConfig(8, 4, "t", dynamic=DynamicConfig(), init_fn=torch.nn.init.zeros_)
