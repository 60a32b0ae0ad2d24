"""Packed rows keep their bound on the error; packed collections equal dequantized references."""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.layout import DynamicConfig
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FeatureProcessedEmbeddingBagCollection,
    PoolingType,
    PositionWeightedModuleCollection,
)
from rayrec.quant import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantType,
    TableRange,
    pack_rows,
    quantize,
    unpack_rows,
)
from rayrec.sparse import KeyedJaggedTensor, UnknownKeyError

INTEGERS = (QuantType.INT8, QuantType.INT4)


def rows_of(kind: str, scale: float, width: int, generator: torch.Generator) -> torch.Tensor:
    shape = (2000, width)
    uniform = torch.rand(shape, generator=generator)
    if kind == "normal":
        return torch.randn(shape, generator=generator) * scale
    if kind == "uniform":
        return (2 * uniform - 1) * scale
    if kind == "positive":
        return uniform * scale
    if kind == "far from zero":
        return (uniform + 20) * scale
    # one row in two is a hundredth of the others
    return (2 * uniform - 1) * scale * torch.tensor([1.0, 0.01]).repeat(1000).unsqueeze(1)


@pytest.mark.parametrize("exponent", range(-6, 4))
@pytest.mark.parametrize("kind", ["normal", "uniform", "positive", "far from zero", "two sizes"])
@pytest.mark.parametrize("stored", INTEGERS)
def test_rounding_costs_at_most_1_05_of_a_perfect_scale(stored, kind, exponent):
    generator = torch.Generator().manual_seed(exponent + 100)
    for width in (4, 7, 64):
        rows = rows_of(kind, 10.0**exponent, width, generator)
        span = TableRange("t", stored)
        span.add(rows[:900], 0)
        span.add(rows[900:], 900)
        power = span.power()
        back = unpack_rows(pack_rows(rows, stored, power), stored, width, power)
        error = (back.double() - rows.double()).abs().amax(1)
        spread = (rows.amax(1) - rows.amin(1)).double()
        near = rows.abs().amax(1) <= 32 * spread
        # half a step of a scale that spans the row exactly
        perfect = spread / (2 * stored.top_code)
        assert near.sum() > 500
        assert (error <= 1.05 * perfect)[near].all(), (error / perfect)[near].max()
        # of rows farther from zero, float16 holds the bias to eleven bits
        assert (error <= 1.05 * perfect + rows.abs().amax(1) * 2**-10 / stored.top_code).all()


@pytest.mark.parametrize("largest", [1e-13, 1e-9, 3e-5, 1.9, 7e3, 6e4])
@pytest.mark.parametrize(("stored", "least"), [(QuantType.INT8, 2e-8), (QuantType.INT4, 2e-9)])
def test_rows_beside_much_larger_ones_keep_the_bound_in_a_stated_range(stored, least, largest):
    generator = torch.Generator().manual_seed(5)
    for part in (1e-3, least, least / 30, least / 1000):
        rows = (torch.rand((2000, 16), generator=generator) - 0.5) * (largest * part)
        rows[:, 0], rows[:, 1], rows[7] = -largest * part / 2, largest * part / 2, largest
        span = TableRange("t", stored)
        span.add(rows, 0)
        back = unpack_rows(pack_rows(rows, stored, span.power()), stored, 16, span.power())
        error = (back.double() - rows.double()).abs().amax(1)
        perfect = (rows.amax(1) - rows.amin(1)).double() / (2 * stored.top_code)
        small = torch.arange(2000) != 7
        inside = part >= least
        more = 0.0 if inside else 1e-12 * largest
        assert (error <= 1.05 * perfect + more)[small].all(), (part, (error / perfect)[small].max())
        # the page says where the bound ends, since there it does
        assert inside or part > least / 100 or (error > 1.05 * perfect)[small].any()


@pytest.mark.parametrize("stored", list(QuantType))
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7e-6, 0.1, 812.3, -65504.0])
def test_rows_of_one_value_come_back(stored, value):
    rows = torch.full((3, 5), value)
    span = TableRange("t", stored)
    span.add(rows, 0)
    back = unpack_rows(pack_rows(rows, stored, span.power()), stored, 5, span.power())
    assert (back - rows).abs().max() <= abs(value) * (2**-11 if stored.bits == 16 else 5e-5)


def test_fp16_keeps_eleven_bits_of_small_rows():
    rows = torch.randn(500, 8) * 1e-6
    span = TableRange("t", QuantType.FP16)
    span.add(rows, 0)
    back = unpack_rows(
        pack_rows(rows, QuantType.FP16, span.power()), QuantType.FP16, 8, span.power()
    )
    assert ((back - rows).abs().amax(1) <= rows.abs().amax(1) * 2**-11).all()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "row 17 of table 'user' holds nan: the model has diverged"),
        (float("inf"), "row 17 of table 'user' holds inf: the model has diverged"),
        (7e4, "row 17 of table 'user' holds 70000; INT8 rows hold at most 65504"),
    ],
)
def test_a_row_that_cannot_be_packed_is_named(value, says):
    collection = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, "user", feature_names=["u"])])
    with torch.no_grad():
        collection.embedding_bags["user"].weight[17, 2] = value
    with pytest.raises(InputError, match=says):
        quantize(collection, "int8")
    if value == 7e4:
        quantize(collection, "fp32")


def random_batch(rng, features, rows, limits, is_weighted, dtype):
    """Ids for every feature, in any order of keys, with keys that nobody reads."""
    keys = [*features, "unread"]
    if rng.random() < 0.6:
        rng.shuffle(keys)
    lengths = [rng.choice([0, 0, 1, 1, 2, 5]) for _ in range(len(keys) * rows)]
    if rng.random() < 0.3:
        lengths = [1] * len(lengths)
    ids = []
    for number, key in enumerate(keys):
        for length in lengths[number * rows : (number + 1) * rows]:
            ids += [rng.randrange(limits.get(key, 9)) for _ in range(length)]
    weights = torch.randn(len(ids)) if is_weighted else None
    return KeyedJaggedTensor(
        keys,
        torch.tensor(ids, dtype=dtype),
        weights,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=rows,
    )


def random_collection(rng):
    """A reference collection, its types, and the rows of the smallest table of each feature."""
    pooled = rng.random() < 0.65
    features = [f"f{i}" for i in range(rng.randint(1, 5))]
    width = rng.choice([4, 5, 7, 8, 16, 33, 64, 128, 256])
    tables, limits = [], {}
    for number in range(rng.randint(1, 5)):
        read = rng.sample(features, rng.randint(1, len(features)))
        rows = rng.randint(1, 60)
        own = rng.choice([1, 2, 3, 4, 8, 9, 20, 65, 256]) if pooled else width
        given = {"num_embeddings": rows, "embedding_dim": own, "name": f"t{number}"}
        given |= {"feature_names": read}
        if pooled:
            pooling = rng.choice([PoolingType.SUM, PoolingType.MEAN])
            tables.append(EmbeddingBagConfig(**given, pooling=pooling))
        else:
            tables.append(EmbeddingConfig(**given))
        limits |= {name: min(rows, limits.get(name, rows)) for name in read}
    if pooled:
        collection = EmbeddingBagCollection(tables, is_weighted=rng.random() < 0.4)
        weights = [collection.embedding_bags[table.name].weight for table in tables]
    else:
        collection = EmbeddingCollection(tables, need_indices=rng.random() < 0.3)
        weights = [collection.embeddings[table.name].weight for table in tables]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(torch.randn(weight.shape) * 10.0 ** rng.randint(-6, 2))
    types = {table.name: rng.choice(list(QuantType)) for table in tables}
    return collection, weights, types, limits


def dequantized(weights, packed):
    """Put the values of the packed rows into the reference collection."""
    with torch.no_grad():
        for number, weight in enumerate(weights):
            weight.copy_(packed.packed.unpacked(number))


def assert_near(got, wanted):
    """Equal up to float32 sums in another order."""
    size = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=3e-6 * size)


@pytest.mark.parametrize("world", range(300))
def test_a_packed_collection_equals_the_dequantized_reference(world):
    rng = random.Random(world)
    torch.manual_seed(world)
    collection, weights, types, limits = random_collection(rng)
    packed = quantize(collection, types)
    dequantized(weights, packed)
    for _ in range(3):
        rows = rng.choice([0, 1, 1, 2, 7, 40])
        is_weighted = isinstance(collection, EmbeddingBagCollection) and collection.is_weighted()
        dtype = rng.choice([torch.int64, torch.int64, torch.int32])
        batch = random_batch(rng, list(limits), rows, limits, is_weighted, dtype)
        with torch.no_grad():
            wanted, got = collection(batch), packed(batch)
        if isinstance(collection, EmbeddingBagCollection):
            assert got.keys() == wanted.keys()
            assert got.length_per_key() == wanted.length_per_key()
            assert got.values().shape == wanted.values().shape
            for name in wanted.keys():  # noqa: SIM118
                assert_near(got[name], wanted[name])
        else:
            assert list(got) == list(wanted)
            for name, bags in wanted.items():
                assert got[name].lengths().tolist() == bags.lengths().tolist()
                assert_near(got[name].values(), bags.values())
                if collection.need_indices():
                    assert got[name].weights().tolist() == bags.weights().tolist()


def simple(**given):
    tables = [
        EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="a", feature_names=["x", "y"]),
        EmbeddingBagConfig(num_embeddings=5, embedding_dim=8, name="b", feature_names=["y"]),
    ]
    return EmbeddingBagCollection(tables, **given)


def batch_of(ids, lengths, keys=("x", "y")):
    return KeyedJaggedTensor(list(keys), torch.tensor(ids), lengths=torch.tensor(lengths))


def test_keys_with_different_numbers_of_bags():
    collection = simple()
    packed = quantize(collection, "fp32")
    batch = KeyedJaggedTensor(
        ["x", "y"],
        torch.tensor([1, 2, 3, 4, 0]),
        lengths=torch.tensor([1, 2, 1, 0, 1]),
        stride_per_key_per_rank=[[3], [2]],
        inverse_indices=(["x", "y"], torch.tensor([[0, 1, 2, 1], [0, 1, 1, 0]])),
    )
    torch.testing.assert_close(packed(batch).values(), collection(batch).values())
    sequences = EmbeddingCollection([EmbeddingConfig(10, 5, "s", feature_names=["x", "y"])])
    wanted, got = sequences(batch), quantize(sequences, "fp32")(batch)
    assert all(torch.equal(got[name].values(), wanted[name].values()) for name in ("x", "y"))


@pytest.mark.parametrize(
    ("ids", "lengths", "says"),
    [
        ([1, 5], [1, 1], r"id 5 of key 'y', row 0 in the lookup of table 'b' is not in \[0, 5\)"),
        ([1, 2, -1, 3], [1, 1, 1, 1], "id -1 of key 'y', row 0 in the lookup of table 'a'"),
        ([10, 2, 1, 3], [1, 1, 1, 1], "id 10 of key 'x', row 0 in the lookup of table 'a'"),
        ([1.0, 2.0], [1, 1], "must be integers"),
    ],
)
def test_a_bad_id_is_named(ids, lengths, says):
    packed = quantize(simple())
    with pytest.raises(InputError, match=says):
        packed(batch_of(ids, lengths))


def test_offsets_that_lead_beyond_the_ids_are_refused():
    packed = quantize(simple())
    generator = random.Random(5)
    refused = 0
    for _ in range(500):
        ids = torch.randint(0, 5, (generator.randint(0, 6),))
        rows = generator.randint(1, 3)
        offsets = [generator.randint(-3, 8) for _ in range(2 * rows + 1)]
        sound = offsets[0] == 0 and offsets[-1] == len(ids) and offsets == sorted(offsets)
        batch = KeyedJaggedTensor(["x", "y"], ids, offsets=torch.tensor(offsets), stride=rows)
        if sound:
            packed(batch)
            continue
        with pytest.raises((ShapeError, InputError)):
            packed(batch)
        refused += 1
    assert refused > 400


def test_missing_keys_and_weights_are_named():
    with pytest.raises(UnknownKeyError, match="no key 'y'"):
        quantize(simple())(batch_of([1], [1], ["x"]))
    with pytest.raises(InputError, match="no weights"):
        quantize(simple(is_weighted=True))(batch_of([1, 1], [1, 1]))


def test_types_by_table_and_what_is_wrong_with_them():
    packed = quantize(simple(), {"a": "fp16", "*": "int4"})
    assert [table.kind for table in packed.packed.tables] == [QuantType.FP16, QuantType.INT4]
    with pytest.raises(ConfigError, match="'int3' is no type of served rows; choose one of fp32"):
        quantize(simple(), "int3")
    with pytest.raises(ConfigError, match="there is no table 'c' to store; the tables are a, b"):
        quantize(simple(), {"c": "int8", "*": "int8"})
    with pytest.raises(ConfigError, match="table 'b' has no type"):
        quantize(simple(), {"a": "int8"})
    with pytest.raises(ConfigError, match="Linear holds no EmbeddingBagCollection"):
        quantize(torch.nn.Linear(2, 2))


def test_a_model_is_copied_and_its_tables_are_not():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            processed = FeatureProcessedEmbeddingBagCollection(
                simple(is_weighted=True), PositionWeightedModuleCollection({"x": 3, "y": 3})
            )
            self.tables, self.top = processed, torch.nn.Linear(16, 1)

        def forward(self, batch):
            return self.top(self.tables(batch).values())

    model = Model()
    packed = quantize(model, "fp32")
    inner = packed.tables._embedding_bag_collection
    assert isinstance(inner, QuantEmbeddingBagCollection) and not packed.training
    assert isinstance(model.tables._embedding_bag_collection, EmbeddingBagCollection)
    assert packed.top.weight is not model.top.weight
    batch = batch_of([1, 2, 3, 4], [2, 1, 0, 1])
    torch.testing.assert_close(packed(batch), model(batch))


def test_no_tables_and_tables_of_another_collection():
    empty = quantize(EmbeddingBagCollection([]))
    assert empty(batch_of([1, 1], [1, 1])).values().shape == (1, 0)
    packed = quantize(simple())
    with pytest.raises(ConfigError, match="in other sizes or another order"):
        QuantEmbeddingBagCollection(packed.embedding_bag_configs()[:1], packed.packed)
    sequences = EmbeddingConfig(num_embeddings=10, embedding_dim=5, name="s", feature_names=["x"])
    assert isinstance(quantize(EmbeddingCollection([sequences])), QuantEmbeddingCollection)


@pytest.mark.parametrize(
    ("config", "reference", "packed"),
    [
        (EmbeddingBagConfig, EmbeddingBagCollection, QuantEmbeddingBagCollection),
        (EmbeddingConfig, EmbeddingCollection, QuantEmbeddingCollection),
    ],
)
def test_dynamic_tables_are_not_packed(config, reference, packed):
    plain, dynamic = (
        config(num_embeddings=8, embedding_dim=4, name=name, feature_names=[name], dynamic=rule)
        for name, rule in (("a", None), ("b", DynamicConfig()))
    )
    collection = reference([plain, dynamic])
    for pack in (packed.from_float, quantize):
        with pytest.raises(
            ConfigError, match="table 'b' is dynamic, and a module does not know its ids"
        ):
            pack(collection)
