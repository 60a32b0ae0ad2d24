"""Small HSTU models for ranking, batches for them, and the same models row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.data.batch import BatchPlace
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.models import HSTURanking
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection, HSTUEncoder
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from tests.unit.sequence_reference import padded_pointwise, random_offsets

KEYS = ["item", "items", "maker", "makers", "actions", "user", "words"]
SIZES = dict(zip(KEYS, [20, 20, 9, 9, 4, 7, 11], strict=True))
HISTORIES = {"items": "item", "makers": "maker", "actions": None}
TABLES = {"item": "goods", "items": "goods", "maker": "makers", "makers": "makers"}
DIM = 8


def ranking(seed: int) -> HSTURanking:
    """With and without context, dense layers, times, and a time of the candidate."""
    torch.manual_seed(seed)
    collections = [
        EmbeddingCollection(
            [
                EmbeddingConfig(20, 6, name="goods", feature_names=["item", "items"]),
                EmbeddingConfig(9, 6, name="makers", feature_names=["maker", "makers"]),
            ]
        ),
        EmbeddingCollection([EmbeddingConfig(4, 3, name="actions", feature_names=["actions"])]),
    ]
    bags = None
    if seed % 2:
        tables = [
            EmbeddingBagConfig(7, 3, "user", feature_names=["user"]),
            EmbeddingBagConfig(11, 5, "words", feature_names=["words"]),
        ]
        bags = EmbeddingBagCollection(tables)
    times = [None, "times", "times"][seed % 3]
    encoder = HSTUEncoder(DIM, 94, 2, 2, 0.0, time_buckets=40 if times else 0)
    sizes = [[6, 1 + seed % 2], bags, [0, 2][seed // 2 % 2], [[], [5]][seed // 4 % 2]]
    hidden, now = [None, 7][seed % 2], [None, "now", None][seed % 3]
    model = HSTURanking(collections, HISTORIES, encoder, *sizes, hidden, times, now)
    for name, parameter in model.named_parameters():
        # biases begin as zeros and norms as ones, which would hide a wrong one
        torch.nn.init.normal_(parameter, std=0.5 if "embed" in name else 0.3)
    return model


class Rows:
    """Rows of a world: one candidate each, none or two now and then; any number of events, or the
    given ones.
    """

    place: BatchPlace | None = None

    def __init__(self, seed: int, lengths: list[int] | None = None) -> None:
        rng, offsets = np.random.default_rng(seed), random_offsets(seed)
        if lengths is not None:
            offsets = torch.tensor([0, *lengths]).cumsum(0)
        lengths = offsets.diff().numpy()
        rows = len(lengths)
        counts = rng.choice([1, 1, 1, 0, 2], rows) if seed % 5 == 0 else np.ones(rows, np.int64)
        bags = [rng.integers(0, 3, rows) for _ in range(2)]
        per_key = [counts, lengths, counts, lengths, lengths, *bags]
        values = [
            rng.integers(0, most, own.sum())
            for most, own in zip(SIZES.values(), per_key, strict=True)
        ]
        self.sparse_features = KeyedJaggedTensor(
            KEYS,
            torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(per_key).astype(np.int32)),
            stride=rows,
        )
        generator = torch.Generator().manual_seed(seed)
        self.dense_features = torch.randn(rows, [0, 2][seed // 2 % 2], generator=generator)
        self.labels = torch.ones(rows)
        total = int(offsets[-1])
        steps = torch.randint(0, 5000, (total + rows,), generator=generator).cumsum(0)
        times = 1_700_000_000 + steps
        ones = torch.arange(rows + 1)
        self.sequences = {
            "times": JaggedTensor(times[:total], offsets=offsets),
            "now": JaggedTensor(times[total:], offsets=ones),
        }


def plain_mlp(layers: Any, x: Tensor) -> Tensor:
    """The MLP of a token, in plain torch."""
    first, swish, second, norm = layers
    x = x @ first.weight.T.double() + first.bias.double()
    own = swish.norm[0]
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, False, keepdim=True) + 1e-5).sqrt()
    x = x * (normed * own.weight.double() + own.bias.double()).sigmoid()
    x = x @ second.weight.T.double() + second.bias.double()
    return functional.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double())


def twin(model: HSTURanking, batch: Rows) -> Tensor:
    """The same model in float64, row by row."""
    p = {name: value.double() for name, value in model.named_parameters()}

    def table(feature: str) -> Tensor:
        kind = "embedding_collections.0.embeddings." + TABLES.get(feature, "")
        if feature == "actions":
            kind = "embedding_collections.1.embeddings.actions"
        if feature in ("user", "words"):
            kind = f"embedding_bag_collection.embedding_bags.{feature}"
        return p[f"{kind}.weight"]

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    ids, logits = batch.sparse_features, []
    lists = {key: ids[key].to_dense() for key in KEYS}
    times, now = (batch.sequences[name].to_dense() for name in ("times", "now"))
    for row in range(ids.stride()):
        found = {key: table(key)[lists[key][row]] for key in KEYS if key not in ("user", "words")}
        item, maker = found["item"].sum(0), found["maker"].sum(0)
        events = torch.cat([found["items"], found["makers"], found["actions"]], dim=1)
        last = torch.cat([item, maker, torch.zeros(3, dtype=torch.float64)])
        tokens = plain_mlp(model.event_arch, torch.cat([events, last.unsqueeze(0)]))
        context = []
        if batch.dense_features.shape[1]:
            columns = batch.dense_features[row].double()
            if isinstance(model.dense_arch, torch.nn.Identity):
                context.append(columns)
            else:
                context.append(linear("dense_arch.model._mlp.0._linear", columns).relu())
        if model.embedding_bag_collection is not None:
            context += [table(key)[lists[key][row]].sum(0) for key in ("user", "words")]
        first = [linear(f"contexts.{n}", one).unsqueeze(0) for n, one in enumerate(context)]
        own = now[row] if model.candidate_time else times[row][-1:]
        own = own if len(own) else torch.zeros(1, dtype=torch.int64)
        seconds = torch.cat([own.expand(len(first)), times[row], own])
        x = torch.cat([*first, tokens / DIM**0.5]) * DIM**0.5
        x = x + p["encoder.position.weight"][: len(x)]
        for n in range(2):
            layer = f"encoder.layers.{n}"

            def norm(part: str, x: Tensor, layer: str = layer) -> Tensor:
                weight, bias = p[f"{layer}.{part}.weight"], p[f"{layer}.{part}.bias"]
                return functional.layer_norm(x, (DIM,), weight, bias)

            hidden = linear(f"{layer}.gate_value_query_key", norm("input_norm", x))
            gate, value, query, key = functional.silu(hidden).chunk(4, dim=1)
            biases = p[f"{layer}.position_bias"], p.get(f"{layer}.time_bias")
            offsets = torch.tensor([0, len(x)])
            attended = padded_pointwise(query, key, value, offsets, *biases, seconds, 2)
            x = x + linear(f"{layer}.output", norm("output_norm", attended) * gate)
        weight, bias = p["encoder.norm.weight"], p["encoder.norm.bias"]
        state = functional.layer_norm(x[-1], (DIM,), weight, bias)
        product = state * plain_mlp(model.candidate_arch, torch.cat([item, maker]))
        hidden = linear("over_arch.model.0._mlp.0._linear", product).relu()
        logits.append(linear("over_arch.model.1", hidden))
    return torch.stack(logits) if logits else torch.zeros(0, 1, dtype=torch.float64)


def cut(ids: KeyedJaggedTensor, low: int, high: int) -> KeyedJaggedTensor:
    """Some rows of a batch."""
    own = {key: ids[key].to_dense()[low:high] for key in ids.keys()}  # noqa: SIM118
    lists = [one for bags in own.values() for one in bags]
    return KeyedJaggedTensor(
        ids.keys(),
        torch.cat([*lists, ids.values()[:0]]),
        lengths=torch.tensor([len(one) for one in lists], dtype=torch.int32),
        stride=high - low,
    )
