"""Packed dynamic tables against a dict from id to row, and the map behind their ids."""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.layout import DynamicConfig
from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.quant import (
    PackedTable,
    PackedTables,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantType,
    pack_rows,
    unpack_rows,
)
from rayrec.quant.ids import PackedIds, bytes_of_ids
from rayrec.quant.tables import laid_out
from rayrec.sparse import KeyedJaggedTensor

EXTREMES = [-(2**63), 2**63 - 1, 0, -2, 1]
Known = dict[int, torch.Tensor]


def random_id(rng: random.Random) -> int:
    one = rng.choice(EXTREMES) if rng.random() < 0.2 else rng.randrange(-(2**63), 2**63)
    return one if one != -1 else 7


def packed_world(rng: random.Random, width: int, tables: int) -> tuple[PackedTables, list[Known]]:
    """Tables, every second one dynamic, and what each id of a table is looked up as."""
    placed = []
    for number in range(tables):
        kind = rng.choice(list(QuantType))
        rows = rng.randint(1, 40)
        placed.append(PackedTable(f"t{number}", rows, width, kind, has_ids=number % 2 == 0))
    laid, num_bytes = laid_out(placed)
    packed = PackedTables(laid, torch.zeros(num_bytes, dtype=torch.uint8))
    known: list[Known] = []
    for number, table in enumerate(laid):
        values = torch.randn(table.rows, width)
        packed.rows_of(number).copy_(pack_rows(values, table.kind))
        values = unpack_rows(packed.rows_of(number), table.kind, width)
        keys = list(range(table.rows))
        if (ids := packed.ids_of(number)) is not None:
            drawn = list({random_id(rng) for _ in range(table.rows)})
            keys = (drawn + [-1] * table.rows)[: table.rows]
            rng.shuffle(keys)
            assert ids.fill(torch.tensor(keys))
        known.append({key: values[row] for row, key in enumerate(keys) if key != -1})
    return packed, known


def batch_of(rng: random.Random, known: list[Known], packed: PackedTables) -> KeyedJaggedTensor:
    """Bags of a feature per table: known ids, and unknown ones of dynamic tables."""
    keys, lengths, values = [], [], list[int]()
    for number, own in enumerate(known):
        keys.append(f"f{number}")
        for _ in range(6):
            length = rng.choice([0, 1, 1, 3])
            lengths.append(length)
            for _ in range(length):
                is_new = packed.tables[number].has_ids and (rng.random() < 0.4 or not own)
                values.append(random_id(rng) if is_new else rng.choice(list(own)))
    weights = torch.rand(len(values))
    ids = torch.tensor(values, dtype=torch.int64)
    return KeyedJaggedTensor(keys, ids, weights, lengths=torch.tensor(lengths))


@pytest.mark.seeds(range(40))
def test_pooled_look_ups_are_those_of_a_dict(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    packed, known = packed_world(rng, 8, rng.randint(1, 4))
    pooling = [rng.choice([PoolingType.SUM, PoolingType.MEAN]) for _ in known]
    tables = [
        EmbeddingBagConfig(
            num_embeddings=table.rows,
            embedding_dim=8,
            name=table.name,
            feature_names=[f"f{number}"],
            pooling=pooling[number],
            dynamic=DynamicConfig() if table.has_ids else None,
        )
        for number, table in enumerate(packed.tables)
    ]
    batch, is_weighted = batch_of(rng, known, packed), rng.random() < 0.5
    got = QuantEmbeddingBagCollection(tables, packed, is_weighted)(batch)
    for number, table in enumerate(tables):
        bags = batch[f"f{number}"]
        for row, (ids, weights) in enumerate(
            zip(bags.to_dense(), bags.to_dense_weights(), strict=True)
        ):
            wanted = torch.zeros(8)
            for one, weight in zip(ids.tolist(), weights.tolist(), strict=True):
                value = known[number].get(one, torch.zeros(8))
                wanted = wanted + value * (weight if is_weighted else 1.0)
            if table.pooling is PoolingType.MEAN and len(ids):
                wanted = wanted / len(ids)
            torch.testing.assert_close(got[f"f{number}"][row], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.seeds(range(20))
def test_sequences_are_those_of_a_dict(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    packed, known = packed_world(rng, 4, 3)
    tables = [
        EmbeddingConfig(
            num_embeddings=table.rows,
            embedding_dim=4,
            name=table.name,
            feature_names=[f"f{number}"],
            dynamic=DynamicConfig() if table.has_ids else None,
        )
        for number, table in enumerate(packed.tables)
    ]
    batch = batch_of(rng, known, packed)
    got = QuantEmbeddingCollection(tables, packed)(batch)
    for number, own in enumerate(known):
        ids = batch[f"f{number}"].values().tolist()
        wanted = [own.get(one, torch.zeros(4)) for one in ids]
        rows = got[f"f{number}"].values()
        assert len(rows) == len(ids)
        assert not ids or torch.equal(rows, torch.stack(wanted))


@pytest.mark.seeds(range(20))
def test_rows_go_over_to_other_ids(seed):
    """So often that the map is made anew many times."""
    rng = random.Random(seed)
    rows = rng.randint(1, 30)
    ids = PackedIds(torch.zeros(bytes_of_ids(rows), dtype=torch.uint8), rows)
    keys = [-1] * rows
    assert ids.fill(torch.tensor(keys))
    pool = list({random_id(rng) for _ in range(2 * rows)})
    for _ in range(200):
        changed = sorted(rng.sample(range(rows), rng.randint(0, rows)))
        kept = {key for row, key in enumerate(keys) if row not in changed}
        free = [one for one in pool if one not in kept]
        for row in changed:
            is_taken = rng.random() < 0.7 and free
            keys[row] = free.pop(rng.randrange(len(free))) if is_taken else -1
        ids.write(torch.tensor(changed, dtype=torch.int64), torch.tensor(keys)[changed])
        wanted = [keys.index(one) if one in keys else rows for one in pool]
        assert ids.find(torch.tensor(pool)).tolist() == wanted
    assert not ids.fill(torch.full((rows,), 5)) or rows == 1
