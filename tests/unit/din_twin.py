"""Small DIN models, batches for them, and the same models in plain torch, padded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.models import DIN
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.sparse import KeyedJaggedTensor
from tests.unit.sequence_reference import padded_target, random_offsets

KEYS = ["item", "before", "shop", "shops", "user", "done"]
HISTORIES = {"before": "item", "shops": "shop"}


def din(seed: int) -> DIN:
    torch.manual_seed(seed)
    sequences = EmbeddingCollection(
        [
            EmbeddingConfig(20, 4, name="goods", feature_names=["item", "before"]),
            EmbeddingConfig(9, 4, name="shops", feature_names=["shop", "shops"]),
            EmbeddingConfig(5, 4, name="actions", feature_names=["done"]),
        ]
    )
    bags = None
    if seed % 2:
        bags = EmbeddingBagCollection([EmbeddingBagConfig(7, 3, "users", feature_names=["user"])])
    sizes = [[6, 1], bags, 2, [[], [5]][seed % 2], [[], [5], [6, 3]][seed % 3], seed % 2 == 0]
    beside = {"before": ["done"]} if seed % 4 < 2 else None
    return DIN(sequences, HISTORIES, *sizes, beside=beside)


def ids(seed: int, lengths: list[int] | None = None) -> KeyedJaggedTensor:
    """One candidate per row, or two or none now and then; histories of random or given lengths."""
    rng = np.random.default_rng(seed)
    lengths = random_offsets(seed).diff().numpy() if lengths is None else np.array(lengths)
    rows = len(lengths)
    counts = rng.choice([1, 1, 1, 0, 2], rows) if seed % 3 == 0 else np.ones(rows, np.int64)
    per_key = [counts, lengths, counts, np.minimum(lengths, 3), rng.integers(0, 3, rows), lengths]
    values = [
        rng.integers(0, most, own.sum())
        for most, own in zip([20, 20, 9, 9, 7, 5], per_key, strict=True)
    ]
    return KeyedJaggedTensor(
        KEYS,
        torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(per_key).astype(np.int32)),
        stride=rows,
    )


def twin(model: DIN, dense: Tensor, features: KeyedJaggedTensor) -> Tensor:
    """The same model in float64, padded, one plain look-up after the other."""
    tables = {name: p.double() for name, p in model.named_parameters()}

    def looked_up(feature: str) -> Tensor:
        table = {"item": "goods", "before": "goods", "done": "actions"}.get(feature, "shops")
        weight = tables[f"embedding_collection.embeddings.{table}.weight"]
        return weight[features[feature].values()]

    def summed(rows: Tensor, feature: str) -> Tensor:
        bags = rows.split(features[feature].lengths().tolist())
        return torch.stack([bag.sum(0) for bag in bags]) if bags else rows[:0]

    def mlp(x: Tensor, name: str, layers: list[str]) -> Tensor:
        for number, layer in enumerate(layers):
            x = x @ tables[f"{name}.{layer}.weight"].T + tables[f"{name}.{layer}.bias"]
            x = x.relu() if number < len(layers) - 1 or name == "dense_arch" else x
        return x

    parts = [dense.double()]
    if model.embedding_bag_collection is not None:
        parts = [mlp(parts[0], "dense_arch", ["model._mlp.0._linear"])]
        weight = tables["embedding_bag_collection.embedding_bags.users.weight"]
        parts.append(summed(weight[features["user"].values()], "user"))
    candidates = {name: summed(looked_up(name), name) for name in ("item", "shop")}
    parts += candidates.values()
    for attention, (history, candidate) in zip(model.attentions, HISTORIES.items(), strict=True):
        offsets, query = features[history].offsets().long(), candidates[candidate]
        events = looked_up(history)
        for other in model.beside.get(history, ()):
            events = torch.cat([events, looked_up(other)], 1)
            query = torch.cat([query, torch.zeros(len(query), 4)], 1)
        parts.append(padded_target(attention, query, events, offsets))
    return mlp(torch.cat(parts, 1), "over_arch", ["model.0._mlp.0._linear", "model.1"])
