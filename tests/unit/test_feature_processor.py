"""Position weights against a loop over bags: values, gradients, ragged and empty bags, keys without
places.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from rayrec.errors import ConfigError, InputError
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from rayrec.sparse import KeyedJaggedTensor

KEYS, PLACES = ["a", "b", "c"], 5


def random_batch(seed: int, weighted: bool = False) -> KeyedJaggedTensor:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = rng.randrange(0, 7)
    lengths = torch.tensor(
        [rng.randrange(PLACES + 1) for _ in range(len(KEYS) * rows)], dtype=torch.int32
    )
    ids = torch.randint(0, 10, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths, stride=rows)


def random_places(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def weights_by_hand(batch: KeyedJaggedTensor, places: dict[str, torch.Tensor]) -> torch.Tensor:
    found = []
    for key in batch.keys():  # noqa: SIM118
        given = batch[key].to_dense_weights()
        for row, bag in enumerate(batch[key].to_dense()):
            for place in range(len(bag)):
                found.append(
                    places[key][place]
                    if key in places
                    else given[row][place]
                    if given is not None
                    else torch.ones(())
                )
    return torch.stack(found) if found else torch.empty(0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.seeds(range(20))
def test_an_id_weighs_what_its_place_does(seed: int, weighted: bool) -> None:
    batch = random_batch(seed, weighted)
    module = PositionWeightedModuleCollection({"c": PLACES + 2, "a": PLACES})
    random_places(module, seed)
    got = module(batch)
    wanted = weights_by_hand(batch, dict(module.position_weights.items()))
    assert (
        torch.equal(got.weights(), wanted)
        and got.values() is batch.values()
        and got.keys() == batch.keys()
    )
    assert torch.equal(got.lengths(), batch.lengths()) and got.stride() == batch.stride()
    sums = torch.rand(len(wanted), generator=torch.Generator().manual_seed(seed))
    grads = torch.autograd.grad(
        (got.weights() * sums).sum(), list(module.parameters()), allow_unused=False
    )
    by_hand = [None] * len(grads)  # all ids may be of the key without places
    if wanted.requires_grad:
        by_hand = torch.autograd.grad(
            (wanted * sums).sum(), list(module.parameters()), allow_unused=True
        )
    for grad, other in zip(grads, by_hand, strict=True):
        torch.testing.assert_close(grad, torch.zeros_like(grad) if other is None else other)


@pytest.mark.seeds(range(5))
def test_one_feature_alone_equals_the_collection(seed: int) -> None:
    batch = random_batch(seed)
    alone, together = (
        PositionWeightedModule(PLACES),
        PositionWeightedModuleCollection({"b": PLACES}),
    )
    random_places(alone, seed)
    random_places(together, seed)
    assert torch.equal(alone(batch["b"]).weights(), together(batch)["b"].weights())


def collection(is_weighted: bool = True) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    tables = [EmbeddingBagConfig(10, 4, f"t_{k}", feature_names=[k]) for k in KEYS]
    return EmbeddingBagCollection(tables, is_weighted=is_weighted)


def processed(kind: str) -> FeatureProcessedEmbeddingBagCollection:
    places = {"a": PLACES, "c": PLACES}
    if kind == "collection":
        return FeatureProcessedEmbeddingBagCollection(
            collection(), PositionWeightedModuleCollection(places)
        )
    return FeatureProcessedEmbeddingBagCollection(
        collection(), {key: PositionWeightedModule(length) for key, length in places.items()}
    )


@pytest.mark.parametrize("kind", ["collection", "one per feature"])
@pytest.mark.seeds(range(5))
def test_bags_are_pooled_with_their_place_weights(seed: int, kind: str) -> None:
    batch, model = random_batch(seed), processed(kind)
    random_places(model._feature_processors, seed)
    pooled = model(batch)
    parameters = dict(model._feature_processors.named_parameters())
    name = "position_weights.{}" if kind == "collection" else "{}.position_weight"
    for key in KEYS:
        table = model._embedding_bag_collection.embedding_bags[f"t_{key}"].weight
        for row, bag in enumerate(batch[key].to_dense()):
            places = parameters[name.format(key)] if key != "b" else torch.ones(PLACES)
            torch.testing.assert_close(
                pooled[key][row], (table[bag] * places[: len(bag), None]).sum(0)
            )
    pooled.values().square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_ids_has_zero_gradients(rows: int) -> None:
    """DDP waits for the gradient of every parameter."""
    model, lengths = processed("collection"), torch.zeros(len(KEYS) * rows, dtype=torch.int32)
    model(
        KeyedJaggedTensor(KEYS, torch.empty(0, dtype=torch.int64), lengths=lengths, stride=rows)
    ).values().sum().backward()
    assert all(
        torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in model.parameters()
    )


def test_at_the_start_places_change_nothing() -> None:
    batch, model = random_batch(3), processed("collection")
    assert torch.equal(model(batch).values(), collection(is_weighted=False)(batch).values())


def test_parameter_names_are_those_of_torchrec() -> None:
    names = set(dict(processed("collection").named_parameters()))
    assert names == {
        "_embedding_bag_collection.embedding_bags.t_" + k + ".weight" for k in KEYS
    } | {"_feature_processors.position_weights.a", "_feature_processors.position_weights.c"}


def test_place_weights_learn_which_place_matters() -> None:
    """Only the first id of a bag decides the label; the weights of the other places must shrink
    beside it.
    """
    model, generator = processed("collection"), torch.Generator().manual_seed(0)
    head = nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=0.02)
    for _ in range(200):
        ids = torch.randint(0, 10, (3, 64, 3), generator=generator)
        batch = KeyedJaggedTensor(KEYS, ids.reshape(-1), lengths=torch.full((3 * 64,), 3))
        logits = head(model(batch)["a"]).squeeze(1)
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(
            logits, (ids[0, :, 0] % 2).float()
        ).backward()
        optimizer.step()
    places = model._feature_processors.position_weights["a"].abs()
    assert places[0] > 5 * places[1:3].max()


@pytest.mark.parametrize("kind", ["collection", "one per feature"])
def test_the_parts_of_a_split_do_what_the_whole_does(kind: str) -> None:
    model = processed(kind)
    random_places(model, 0)
    processors, tables = model.split()
    batch = random_batch(3)
    assert torch.equal(tables(processors(batch)).values(), model(batch).values())
    assert {*processors.parameters(), *tables.parameters()} == {*model.parameters()}


def test_what_does_not_fit_is_refused() -> None:
    batch = random_batch(1)
    with pytest.raises(
        InputError, match=r"feature 'a' has a bag of \d ids, more than the 1 places"
    ):
        PositionWeightedModuleCollection({"a": 1})(
            KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([3]))
        )
    with pytest.raises(InputError, match="more than the 1 places"):
        PositionWeightedModule(1)(
            KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([3]))["a"]
        )
    with pytest.raises(InputError, match="no feature 'z'"):
        PositionWeightedModuleCollection({"z": 1})(batch)
    with pytest.raises(ConfigError, match="at least 1"):
        PositionWeightedModule(0)
    with pytest.raises(ConfigError, match="cannot name"):
        PositionWeightedModuleCollection({"a.b": 1})
    with pytest.raises(ConfigError, match="is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(collection(is_weighted=False), {})
    with pytest.raises(ConfigError, match="'z', which no table"):
        FeatureProcessedEmbeddingBagCollection(collection(), {"z": PositionWeightedModule(2)})
