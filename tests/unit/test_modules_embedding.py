"""The unsharded collections against one plain lookup per bag: outputs and gradients, over random
tables and batches.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from rayrec.errors import ConfigError, InputError
from rayrec.modules import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor, UnknownKeyError

from .jagged_reference import PlainBatch, random_batch

SEEDS = range(40)


def random_tables(seed: int, features: list[str]) -> list[EmbeddingBagConfig]:
    rng, tables = random.Random(seed), []
    for index in range(rng.randint(1, 4)):
        tables.append(
            EmbeddingBagConfig(
                name=f"t{index}",
                num_embeddings=100,
                embedding_dim=rng.choice([4, 8, 12]),
                feature_names=rng.sample(features, rng.randint(1, len(features))),
                pooling=rng.choice([PoolingType.SUM, PoolingType.MEAN]),
                data_type=rng.choice(list(DataType)),
            )
        )
    return tables


def plain_forward(collection: EmbeddingBagCollection, batch: PlainBatch) -> dict[str, torch.Tensor]:
    """output name -> (B, D) float64, bag by bag."""
    outputs: dict[str, torch.Tensor] = {}
    tables = collection.embedding_bag_configs()
    for table in tables:
        weight = collection.embedding_bags[table.name].weight.double()
        for feature in table.feature_names:
            shared = sum(feature in other.feature_names for other in tables) > 1
            rows = []
            for row, bag in enumerate(batch.bags[feature]):
                total = weight.new_zeros(table.embedding_dim)
                for place, i in enumerate(bag):
                    total = total + weight[i] * (
                        batch.weights[feature][row][place] if collection.is_weighted() else 1
                    )
                rows.append(
                    total / len(bag) if bag and table.pooling is PoolingType.MEAN else total
                )
            stacked = torch.stack(rows) if rows else weight.new_zeros(0, table.embedding_dim)
            if batch.inverse is not None:
                stacked = stacked[batch.inverse[list(batch.bags).index(feature)]]
            outputs[f"{feature}@{table.name}" if shared else feature] = stacked
    return outputs


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.seeds(SEEDS)
def test_pooled_outputs_and_gradients_equal_a_lookup_per_bag(seed, variable):
    batch = random_batch(seed, variable=variable, keys=3)
    if variable and batch.inverse is None:
        return
    tables = random_tables(seed, list(batch.bags))
    collection = EmbeddingBagCollection(tables, is_weighted=batch.weights is not None)
    got, want = collection(batch.kjt()), plain_forward(collection, batch)
    assert (
        got.keys() == list(want)
        and got.values().dtype == torch.float32
        and got.values().shape[0] == batch.rows
    )
    assert got.length_per_key() == [t.embedding_dim for t in tables for _ in t.feature_names]
    for key, tensor in want.items():
        # float32 sums of at most four rows
        torch.testing.assert_close(got[key].double(), tensor, rtol=1e-5, atol=1e-6)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(got.values().shape, generator=generator)
    parameters = list(collection.parameters())
    grads = torch.autograd.grad((got.values() * scale).sum(), parameters)
    loss = (torch.cat(list(want.values()), 1) * scale).sum() + sum(
        0 * parameter.sum() for parameter in parameters
    )
    for parameter, one, two in zip(
        parameters, grads, torch.autograd.grad(loss, parameters), strict=True
    ):
        # torch adds up float16 gradients in float16
        tolerance = 1e-5 if parameter.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def test_gradients_reach_the_weights_of_ids():
    table = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=4, feature_names=["f"])
    collection = EmbeddingBagCollection([table], is_weighted=True)
    weights = torch.ones(2, requires_grad=True)
    collection(
        KeyedJaggedTensor(["f"], torch.tensor([0, 2]), weights, torch.tensor([1, 1]))
    ).values().sum().backward()
    torch.testing.assert_close(
        weights.grad, collection.embedding_bags["t"].weight.detach()[[0, 2]].sum(1)
    )


@pytest.mark.parametrize("kind", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_of_no_rows_gives_zero_gradients(weighted, kind):
    tables = [
        EmbeddingBagConfig(
            3, 4, "t", feature_names=["f", "g"], data_type=kind, pooling=PoolingType.MEAN
        )
    ]
    collection = EmbeddingBagCollection(tables, is_weighted=weighted)
    none = torch.empty(0, dtype=torch.int32)
    pooled = collection(
        KeyedJaggedTensor(["f", "g"], none.long(), torch.empty(0) if weighted else None, none)
    ).values()
    assert pooled.shape == (0, 8)
    pooled.sum().backward()
    assert not collection.embedding_bags["t"].weight.grad.any()


def test_names_and_state_dict_are_those_of_torchrec():
    tables = [
        EmbeddingBagConfig(name="t1", num_embeddings=3, embedding_dim=4, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="t2", num_embeddings=3, embedding_dim=8, feature_names=["b"]),
    ]
    collection = EmbeddingBagCollection(tables, device="meta")
    assert list(collection.state_dict()) == ["embedding_bags.t1.weight", "embedding_bags.t2.weight"]
    assert collection.device.type == "meta" and collection.embedding_bags["t1"].weight.is_meta
    assert collection.embedding_bag_configs() == tables and not collection.is_weighted()
    real = EmbeddingBagCollection(tables)
    assert real(
        KeyedJaggedTensor(["b", "a"], torch.tensor([0, 1]), lengths=torch.tensor([1, 1]))
    ).keys() == ["a", "b@t1", "b@t2"]


def test_initial_values_depend_on_the_seed_and_the_table_alone():
    one = EmbeddingBagConfig(name="t1", num_embeddings=3, embedding_dim=4, feature_names=["a"])
    two = EmbeddingBagConfig(name="t2", num_embeddings=3, embedding_dim=4, feature_names=["b"])
    before = torch.initial_seed()
    try:
        torch.manual_seed(5)
        alone = EmbeddingBagCollection([two]).embedding_bags["t2"].weight
        torch.rand(3)
        assert torch.equal(alone, EmbeddingBagCollection([one, two]).embedding_bags["t2"].weight)
        torch.manual_seed(6)
        assert not torch.equal(alone, EmbeddingBagCollection([two]).embedding_bags["t2"].weight)
    finally:
        torch.manual_seed(before)


def test_mistakes_raise_typed_errors():
    def table(name="t", dim=4):
        return EmbeddingBagConfig(3, dim, name, feature_names=["f"])

    with pytest.raises(ConfigError, match="named twice"):
        EmbeddingBagCollection([table(), table()])
    for name in ("a.b", "values"):
        with pytest.raises(ConfigError, match="cannot name a torch module"):
            EmbeddingBagCollection([table(name)])
    collection = EmbeddingBagCollection([table()], is_weighted=True)
    ids = KeyedJaggedTensor(["f"], torch.tensor([0, 1, 7]), torch.ones(3), torch.tensor([1, 2]))
    with pytest.raises(InputError, match="id 7 of key 'f', row 1"):
        collection(ids)
    with pytest.raises(UnknownKeyError, match="no key 'f'"):
        collection(KeyedJaggedTensor(["g"], torch.tensor([0]), torch.ones(1), torch.tensor([1])))
    with pytest.raises(InputError, match="no weights"):
        collection(KeyedJaggedTensor(["f"], torch.tensor([0]), None, torch.tensor([1])))
    two = EmbeddingBagCollection([EmbeddingBagConfig(3, 4, "t", feature_names=["f", "g"])])
    with pytest.raises(InputError, match="needs inverse_indices"):
        two(
            KeyedJaggedTensor(
                ["f", "g"],
                torch.tensor([0, 1, 2]),
                None,
                torch.tensor([1, 1, 1]),
                stride_per_key_per_rank=[[1], [2]],
            )
        )
    with pytest.raises(InputError, match="inverse index 1 of key 'f', row 0"):
        two(
            KeyedJaggedTensor(
                ["f", "g"],
                torch.tensor([0, 1, 2]),
                None,
                torch.tensor([1, 1, 1]),
                stride_per_key_per_rank=[[1], [2]],
                inverse_indices=(["f", "g"], torch.tensor([[1], [1]])),
            )
        )
    with pytest.raises(ConfigError, match="table 's' is one of sequences"):
        EmbeddingBagCollection([EmbeddingConfig(3, 4, "s", feature_names=["f"])])
    with pytest.raises(ConfigError, match="one width"):
        EmbeddingCollection(
            [
                EmbeddingConfig(3, 4, "a", feature_names=["f"]),
                EmbeddingConfig(3, 8, "b", feature_names=["g"]),
            ]
        )


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.seeds(range(15))
def test_sequences_are_the_rows_of_the_ids(seed, need_indices):
    batch = random_batch(seed, variable=False, keys=3)
    kind = DataType.FP16 if seed % 2 else DataType.FP32
    tables = [
        EmbeddingConfig(100, 4, "a", kind, ["f0", "f1"]),
        EmbeddingConfig(100, 4, "b", kind, ["f1", "f2"]),
    ]
    collection = EmbeddingCollection(tables, need_indices=need_indices)
    assert (
        list(collection.state_dict()) == ["embeddings.a.weight", "embeddings.b.weight"]
        and collection.embedding_dim() == 4
    )
    outputs = collection(batch.kjt())
    assert (
        list(outputs)
        == ["f0", "f1@a", "f1@b", "f2"]
        == [name for names in collection.embedding_names_by_table() for name in names]
    )
    for (name, jt), table in zip(outputs.items(), "aabb", strict=True):
        bags = batch.bags[name.split("@")[0]]
        ids = [i for bag in bags for i in bag]
        assert torch.equal(
            jt.values(), collection.embeddings[table].weight[ids].float()
        ) and jt.values().shape == (len(ids), 4)
        assert jt.lengths().tolist() == [len(bag) for bag in bags]
        assert (jt.weights().tolist() == ids) if need_indices else (jt.weights_or_none() is None)
    sum(jt.values().sum() for jt in outputs.values()).backward()
    ids = [i for feature in ("f0", "f1") for bag in batch.bags[feature] for i in bag]
    count = torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=100)
    grad = collection.embeddings["a"].weight.grad
    assert torch.equal(grad, count[:, None].expand(-1, 4).to(grad.dtype))


def test_sequences_name_the_bad_id():
    collection = EmbeddingCollection([EmbeddingConfig(3, 4, "a", feature_names=["f"])])
    with pytest.raises(InputError, match="id -1 of key 'f', row 1"):
        collection(KeyedJaggedTensor(["f"], torch.tensor([0, -1]), lengths=torch.tensor([1, 1])))


def collection_of(sequence: bool) -> nn.Module:
    if sequence:
        return EmbeddingCollection([EmbeddingConfig(3, 4, "a", feature_names=["f"])])
    return EmbeddingBagCollection([EmbeddingBagConfig(3, 4, "a", feature_names=["f"])])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_ids_may_be_integers_of_any_width(sequence, dtype):
    collection, lengths = collection_of(sequence), torch.tensor([1, 1])
    want, rows = (
        collection(KeyedJaggedTensor(["f"], torch.tensor([0, 2], dtype=kind), lengths=lengths))["f"]
        for kind in (torch.int64, dtype)
    )
    if sequence:
        want, rows = want.values(), rows.values()
    assert torch.equal(rows, want)


@pytest.mark.parametrize("sequence", [False, True])
def test_ids_that_are_fractions_are_refused(sequence):
    ids = KeyedJaggedTensor(["f"], torch.tensor([0.0, 1.7]), lengths=torch.tensor([1, 1]))
    with pytest.raises(InputError, match=r"of table 'a' are torch\.float32; they must be integers"):
        collection_of(sequence)(ids)


def test_pooled_rows_regroup_for_an_interaction():
    tables = [EmbeddingBagConfig(3, 4, n, feature_names=[n]) for n in ("x", "y")]
    kt = EmbeddingBagCollection(tables)(
        KeyedJaggedTensor(["x", "y"], torch.tensor([0, 1]), lengths=torch.tensor([1, 1]))
    )
    (swapped,) = KeyedTensor.regroup([kt], [["y", "x"]])
    assert torch.equal(swapped, torch.cat([kt["y"], kt["x"]], 1))
