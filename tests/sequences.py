"""A small next-item model, its batches by step and rank, and the same in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.data import ItemSlices, SharedNegatives
from rayrec.data.batch import BatchPlace
from rayrec.data.candidates import with_bag
from rayrec.layout import EmbeddingConfig, ShardingPlan, Topology
from rayrec.models import FullSoftmax, NextItem, NextItemTrain, SampledSoftmax
from rayrec.modules import EmbeddingCollection, JaggedDropout
from rayrec.modules.jagged_dropout import value_keys
from rayrec.modules.jagged_rows import JaggedOffsets
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor

ITEMS, WIDTH, SEED = 23, 8, 5
COUNTS = np.arange(ITEMS) % 7  # some items never occur
NEGATIVES = SharedNegatives(count=16, num_items=ITEMS, counts=COUNTS)
SLICES = ItemSlices(num_items=ITEMS)
LOSSES = ("full", "popularity", "uniform")


class MeanOfPast(nn.Module):
    """A small encoder: a layer over the mean of each history up to the position, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), JaggedDropout(dropout)

    def forward(
        self, values: Tensor, offsets: Tensor, times: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        means = [
            part.cumsum(0) / torch.arange(1, len(part) + 1).unsqueeze(1)
            for part in values.tensor_split(offsets[1:-1].long())
        ]
        own = None
        if keys is not None:
            own = value_keys(keys, JaggedOffsets(offsets, len(values)))
        return self.dropout(torch.tanh(self.layer(torch.cat(means))), own)


class Part:
    """A rank's part of a global batch."""

    def __init__(self, histories: list[list[int]], items: list[int], total: int) -> None:
        self.rows, self.global_rows, self.labels = len(items), total, torch.ones(len(items))
        flat = [one for history in histories for one in history]
        lengths = [*map(len, histories), *([1] * len(items))]
        self.sparse_features = KeyedJaggedTensor(
            ["history", "item"],
            torch.tensor([*flat, *items], dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            stride=len(items),
        )


def candidates_of(loss: str):
    if loss == "full":
        return SLICES
    if loss == "popularity":
        return NEGATIVES
    return SharedNegatives(count=16, num_items=ITEMS, proposal="uniform")


def histories(step: int) -> tuple[list[list[int]], list[int]]:
    """The rows of a global batch: some without a history; the last batch has a single row."""
    rng = np.random.default_rng(step)
    rows = 1 if step == 3 else 9
    lengths = [4] if rows == 1 else [0, 9, 1, 2, 0, 5, 3, 1, 6]
    return [rng.integers(0, ITEMS, n).tolist() for n in lengths], rng.integers(
        0, ITEMS, rows
    ).tolist()


def part(step: int, rank: int, ranks: int, loss: str) -> Part:
    past, items = histories(step)
    rows = slice(rank * len(items) // ranks, (rank + 1) * len(items) // ranks)
    own = Part(past[rows], items[rows], len(items))
    ids = torch.from_numpy(candidates_of(loss).ids(SEED, step, rank, ranks))
    own.sparse_features = with_bag(own.sparse_features, "candidates", ids)
    own.place = BatchPlace(SEED, step, rows.start)
    return own


def build(loss: str, device: str = "meta", dropout: float = 0.0) -> NextItemTrain:
    torch.manual_seed(3)
    features = ["history", "item", "candidates"]
    table = EmbeddingConfig(
        ITEMS,
        WIDTH,
        name="movie",
        feature_names=features,
        weight_init_min=-0.5,
        weight_init_max=0.5,
    )
    collection = EmbeddingCollection([table], device=device)
    bias = torch.linspace(-1, 1, ITEMS)
    log_q = torch.from_numpy(NEGATIVES.log_q()) if loss == "popularity" else None
    objective = FullSoftmax(ITEMS) if loss == "full" else SampledSoftmax(ITEMS, log_q)
    return NextItemTrain(NextItem(collection, MeanOfPast(dropout), bias=bias), objective)


def plan_of(kind: str, ranks: int) -> ShardingPlan:
    tables = build("full").model.items.embedding_configs()
    return manual_plan(tables, kind, Topology.local(ranks))


def plain_loss(model: NextItemTrain, step: int, loss: str) -> Tensor:
    """The loss of a global batch, token by token, in torch alone."""
    weight, bias = model.model.items.embeddings["movie"].weight, model.model.bias
    losses = []
    for past, item in zip(*histories(step), strict=True):
        for t in range(len(past)):
            rows = weight[torch.tensor(past[: t + 1])]
            token = torch.tanh(model.model.encoder.layer(rows.mean(0)))
            own = [*past, item][t + 1]
            scores = weight @ token + bias
            if loss == "full":
                losses.append(functional.cross_entropy(scores, torch.tensor(own)))
                continue
            chances = COUNTS / COUNTS.sum() if loss == "popularity" else np.ones(ITEMS) / ITEMS
            drawn = candidates_of(loss).ids(SEED, step, 0, 1)
            terms = [scores[own]] + [
                scores[n] - float(np.log(chances[n])) - float(np.log(len(drawn)))
                for n in drawn
                if n != own
            ]
            losses.append(torch.stack(terms).logsumexp(0) - scores[own])
    return torch.stack(losses).mean()
