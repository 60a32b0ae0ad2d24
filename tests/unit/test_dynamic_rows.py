"""Rows of dynamic tables against a twin in plain Python, and cut into any shards."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rayrec.data import FeatureSchema
from rayrec.dynamic.clock import IdClock, Instant
from rayrec.dynamic.columns import lanes_of
from rayrec.dynamic.first_values import first_values
from rayrec.dynamic.fused_rows import FusedRows
from rayrec.dynamic.key_blocks import blocks_of
from rayrec.errors import ConfigError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, Shard
from rayrec.modules import EmbeddingBagCollection
from tests.unit.dynamic_twin import SEED, Twin, drifting, wandering


def shards_of(table: EmbeddingBagConfig, cuts: list[int]) -> tuple[FusedRows, list[Tensor]]:
    """The table as shards with row cuts, and the values of the rows of each."""
    shards, whole, begins = [], [], []
    for start, stop in pairwise(cuts):
        values = torch.zeros(stop - start, table.embedding_dim)

        def begin(rows: Tensor, first: Tensor, values: Tensor = values) -> None:
            values[rows] = first

        shards.append(Shard("t", range(start, stop), range(table.embedding_dim), 0))
        whole.append(values)
        begins.append(begin)
    return FusedRows([table] * len(shards), SEED, shards, begins), whole


@pytest.mark.seeds(range(60))
def test_rows_come_and_go_as_in_plain_python_whatever_the_cuts(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.choice([1, 2, 4, 8])
    threshold = rng.choice([1, 1, 2, 4])
    rule = DynamicConfig(
        admission_threshold=threshold,
        counter_capacity=None
        if threshold == 1
        else rng.choice([None, blocks, 5 * blocks, 9 * blocks, 50 * blocks]),
        admission_probability=rng.choice([1.0, 1.0, 0.6]),
        eviction=rng.choice(["step", "timestamp", "lfu", "none"]),
        blocks=blocks,
        read_only_features=("r",),
        **rng.choice(
            [
                {},
                {"ttl_steps": 3},
                {"ttl_steps": 20},
                {"ttl_s": 25},
                {"ttl_s": 300},
                {"ttl_steps": 12, "feature_ttl_steps": {"g": 2, "h": 6}},
                {"ttl_s": 200, "feature_ttl_s": {"g": 5, "h": 90}},
            ]
        ),
    )
    table = EmbeddingBagConfig(blocks * rng.choice([3, 8, 20]), 4, "t", dynamic=rule)
    inner = [table.row_multiple * i for i in range(1, blocks) if rng.random() < 0.5]
    fused, values = shards_of(table, [0, *inner, table.num_embeddings])
    parts = fused.of_shards
    twin = Twin(table)
    told: Counter[str] = Counter()
    clock, times = IdClock(timed=rule.uses_time), iter(wandering(rng, 60))
    # one has no time of its own, two may have one, and one may admit none
    features = rng.choice(["f", "fgh", "gh", "fghr"])
    for step, ids in enumerate(drifting(rng, 60), start=1):
        time = next(times)
        clock.begin(True, time)
        # ids arrive in another order on other plans
        shuffled = rng.sample(ids, len(ids))
        of_ids = [rng.choice(features) for _ in shuffled]
        seen = [(one, of) for one, of in zip(shuffled, of_ids, strict=True) if of != "r"]
        twin.step([one for one, _ in seen], step, time, [of for _, of in seen])
        twin.counts["looked_up"] += len(ids)
        twin.counts["unknown"] += sum(not twin.is_known(one, step) for one in ids)
        first_row = blocks_of(np.array(shuffled, np.int64), blocks) * table.row_multiple
        shard_of = np.searchsorted(inner, first_row, side="right")
        order = np.argsort(shard_of, kind="stable")
        bounds = np.searchsorted(shard_of[order], range(len(parts) + 1)).tolist()
        sent = torch.tensor(shuffled, dtype=torch.int64)[order]
        rows = fused.admit(
            sent,
            bounds,
            clock.now,
            torch.tensor([rule.lag(of) for of in of_ids], dtype=torch.int64)[order]
            if features != "f"
            else None,
        )
        for one, row in zip(sent.tolist(), rows.tolist(), strict=True):
            assert (row >= 0) == twin.is_known(one, step), (step, one)
        for part, (low, high) in zip(parts, pairwise(bounds), strict=True):
            own = sent[low:high].tolist()
            known = {row for row in rows[low:high].tolist() if row >= 0}
            assert len(known) == len({o for o in own if twin.is_known(o, step)}), "one row each"
            if rng.random() < 0.2:
                told.update(sums(part.take_counts(clock.now)))
            if rng.random() < 0.1:  # as a restore does it
                kept = {name: column.clone() for name, column in part.tensors().items()}
                for column in part.tensors().values():
                    column.fill_(-1)
                part.held(clock.now)
                for name, column in part.tensors().items():
                    column.copy_(kept[name])
    held = {}
    for number, part in enumerate(parts):
        told.update(part.take_counts(clock.now))
        columns = part.tensors()
        for row, one in enumerate(columns["id_key"].tolist()):
            if one != -1:
                held[one] = [
                    column[row].item() for name, column in columns.items() if name[:3] == "id_"
                ]
                at = [int(shard > number) for shard in range(len(parts) + 1)]
                found = fused.find(torch.tensor([one]), at, clock.now).item()
                assert found == (row if twin.is_known(one, 60) else -1)
                first = first_values(SEED, table, np.array([one]), range(4))[0]
                assert torch.equal(values[number][row], first)
    wanted = {
        one: [one, seen, place.ids[one].count, *([at] if rule.uses_time else [])]
        for place in twin.rows
        for one in place.ids
        for seen, at in [place.stamps(one)]
    }
    assert held == wanted
    waiting = {
        key: [columns[f"{lane}_{name}"][row].item() for name in ("seen", "hits")]
        for columns in (part.tensors() for part in parts)
        for lane in lanes_of("candidate", columns)
        for row, key in enumerate(columns[f"{lane}_key"].tolist())
        if key != -1
    }
    assert waiting == {
        one: [place.stamps(one)[0], known.count]
        for place in twin.waiting
        for one, known in place.ids.items()
    }
    assert told == Counter(twin.told(60))


def sums(counts: dict[str, int]) -> dict[str, int]:
    """Counts without the two that say how many ids there are now."""
    return {name: n for name, n in counts.items() if name not in ("held", "candidates")}


@pytest.mark.parametrize("eviction", ["step", "lfu", "none"])
def test_a_step_with_more_ids_than_rows_refuses_the_rest_and_counts_them(eviction: str) -> None:
    rule = DynamicConfig(blocks=1, eviction=eviction)
    table = EmbeddingBagConfig(4, 4, "t", dynamic=rule)
    fused, _ = shards_of(table, [0, 4])
    (part,) = fused.of_shards

    def admit(ids: list[int], step: int) -> list[int]:
        rows = fused.admit(torch.tensor(ids), [0, len(ids)], Instant(step)).tolist()
        return [one for one, row in zip(ids, rows, strict=True) if row >= 0]

    # the four that occur most often; a row of this step goes to nobody else
    first = [1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7]
    assert admit(first, 1) == first[:8]
    told = part.take_counts(Instant(1))
    assert (told["held"], told["admitted"], told["refused"], told["unknown"]) == (4, 4, 3, 3)
    # now those rows are of another step; "none" never takes one back
    second = [5, 6, 7, 8, 9]
    assert len(admit(second, 2)) == (0 if eviction == "none" else 4)
    told = part.take_counts(Instant(2))
    assert (told["held"], told["refused"]) == (4, 5 if eviction == "none" else 1)
    assert told["evicted"] == (0 if eviction == "none" else 4)


def test_counts_stop_at_the_largest_that_a_column_holds() -> None:
    table = EmbeddingBagConfig(4, 4, "t", dynamic=DynamicConfig(blocks=1))
    fused, _ = shards_of(table, [0, 4])
    (part,) = fused.of_shards
    fused.admit(torch.tensor([7, 8]), [0, 2], Instant(1))
    kept = {name: column.clone() for name, column in part.tensors().items()}
    kept["id_hits"] = torch.where(kept["id_key"] == 7, 2**31 - 3, kept["id_hits"])
    for name, column in part.tensors().items():
        column.copy_(kept[name])
    for step in (2, 3):
        fused.admit(torch.tensor([7, 8, 7, 7]), [0, 4], Instant(step))
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
        ({"ttl_s": 0}, "ttl_s=0"),
        ({"ttl_s": 2.5}, "ttl_s"),
        (
            {"ttl_s": 60, "ttl_steps": 5},
            "ttl_steps=5 and ttl_s=60; ids grow old by one of them: leave the other out",
        ),
        ({"blocks": 3}, "blocks=3; it must be a power of two"),
        ({"eviction": "random"}, "eviction"),
        (
            {"ttl_steps": 2**63 - 1},
            "ttl_steps=9223372036854775807; it must be .* at most 2147483647",
        ),
        ({"admission_threshold": 2**31}, "at most 2147483647"),
        ({"admission_threshold": 2, "counter_capacity": 0}, "counter_capacity=0; it must be at"),
        ({"counter_capacity": 8}, "counter_capacity=8 and admission_threshold=1, with which ids"),
        ({"read_only_features": "negatives"}, "read_only_features"),
        ({"feature_ttl_steps": {"f": 5}}, "feature_ttl_steps without ttl_steps, which is for all"),
        ({"feature_ttl_s": {"f": 5}, "ttl_steps": 9}, "feature_ttl_s without ttl_s, which is for"),
        (
            {"feature_ttl_steps": {"f": 10}, "ttl_steps": 9},
            "feature_ttl_steps=10 for 'f'; it must be at least 1 and at most ttl_steps=9, which",
        ),
        ({"feature_ttl_s": {"f": 0}, "ttl_s": 9}, "feature_ttl_s=0 for 'f'"),
        ({"feature_ttl_s": {"f": 2.5}, "ttl_s": 9}, "feature_ttl_s"),
        (
            {"feature_ttl_s": {"f": 5}, "ttl_s": 9, "read_only_features": ("f",)},
            "'f' in feature_ttl_s and in read_only_features, which keep no id for longer",
        ),
    ],
)
def test_rules_out_of_range_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DynamicConfig(**options)  # type: ignore[arg-type]


def test_read_only_features_are_features_of_the_table() -> None:
    text = """{"label": "click", "features": [{"name": "item", "column": "item"},
        {"name": "seen", "column": "seen"}], "tables": [
        {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "features": ["item", "seen"],
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


def test_features_with_a_time_of_their_own_are_features_of_the_table() -> None:
    text = """{"label": "click", "features": [{"name": "item", "column": "item"},
        {"name": "seen", "column": "seen"}], "tables": [
        {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "features": ["item", "seen"],
         "dynamic": {"ttl_steps": 9, "feature_ttl_steps": {"%s": 4}}}]}"""
    schema = FeatureSchema.from_json(text % "seen")
    rule = schema.tables[0].dynamic
    assert rule == DynamicConfig(ttl_steps=9, feature_ttl_steps={"seen": 4})
    assert (rule.lag("item"), rule.lag("seen")) == (0, 5)
    assert FeatureSchema.from_json(schema.to_json()) == schema
    with pytest.raises(ConfigError, match="table 't' has 'other' among feature_ttl_steps, and no"):
        FeatureSchema.from_json(text % "other")


def test_blocks_divide_the_rows() -> None:
    assert EmbeddingBagConfig(1 << 20, 4, "t", dynamic=DynamicConfig()).row_multiple == 4096
    assert EmbeddingBagConfig(10_007, 4, "t", dynamic=DynamicConfig()).row_multiple == 10_007
    with pytest.raises(ConfigError, match=r"table 't': DynamicConfig has blocks=4, which does not"):
        EmbeddingBagConfig(10, 4, "t", dynamic=DynamicConfig(blocks=4))
    for rows, rule in ((3_000_000_001, DynamicConfig()), (2**31, DynamicConfig(blocks=1))):
        # free places of a block are numbers of 32 bits
        with pytest.raises(ConfigError, match=rf"table 't': .*blocks=1 make blocks of {rows} rows"):
            EmbeddingBagConfig(rows, 4, "t", dynamic=rule)
    assert EmbeddingBagConfig(2**31, 4, "t", dynamic=DynamicConfig()).row_multiple == 2**21
    rule = DynamicConfig(blocks=4, admission_threshold=2, counter_capacity=10)
    with pytest.raises(ConfigError, match=r"table 't': .*=10, which the 4 blocks of the table do"):
        EmbeddingBagConfig(8, 4, "t", dynamic=rule)
    with pytest.raises(ConfigError, match="init_fn and dynamic"):
        EmbeddingBagConfig(8, 4, "t", dynamic=DynamicConfig(), init_fn=torch.nn.init.zeros_)
