"""A DLRM in plain torch, the twin of `benchmarks.quality_run`: one `nn.EmbeddingBag` a table.

Nothing of rayrec is in it but the schema of the data and the recipe's numbers: rows are read by
pyarrow and shuffled whole, tables are unsharded, the optimizers are torch's, and the AUC is counted
from sorted scores. torch has no row-wise Adagrad, so `RowWise` is written here. Initial values have
the same bounds and come from torch's generator, so two runs of one recipe differ by chance alone.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.quality_run import schema_of
from benchmarks.quality_settings import Recipe
from rayrec.data import FeatureSchema
from rayrec.layout import PoolingType


class Column(NamedTuple):
    """Ids of one column: those of row i are values[starts[i]:starts[i + 1]]."""

    values: Tensor
    starts: Tensor

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The ids of some rows one after the other, and where each row's begin."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        ends = lengths.cumsum(0)
        places = torch.arange(int(ends[-1])) + torch.repeat_interleave(
            self.starts[rows] - ends + lengths, lengths
        )
        return self.values[places], ends - lengths


class Rows(NamedTuple):
    """A part of a data set in memory."""

    dense: Tensor
    ids: list[Column]
    labels: Tensor


def read(folder: Path, schema: FeatureSchema) -> Rows:
    """Read a folder of Parquet."""
    table = pq.read_table(folder).combine_chunks()
    dense = np.zeros((table.num_rows, len(schema.dense)), np.float32)
    for place, number in enumerate(schema.dense):
        dense[:, place] = table[number.column].to_numpy()
    ids = []
    for feature in schema.features:
        column = table[feature.column].chunk(0)
        if hasattr(column, "offsets"):
            values, starts = column.values.to_numpy(), column.offsets.to_numpy()
        else:
            values, starts = column.to_numpy(), np.arange(len(column) + 1)
        ids.append(Column(torch.tensor(values).long(), torch.tensor(starts).long()))
    labels = torch.tensor(table[schema.labels[0]].to_numpy()).float()
    return Rows(torch.tensor(dense), ids, labels)


class Twin(nn.Module):
    """A DLRM of nn.EmbeddingBag and nn.Linear."""

    def __init__(self, schema: FeatureSchema, recipe: Recipe) -> None:
        super().__init__()
        bags = []
        for table in schema.embedding_bag_configs():
            mode = "mean" if table.pooling is PoolingType.MEAN else "sum"
            bag = nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode=mode)
            nn.init.uniform_(bag.weight, *table.init_bounds())
            bags.append(bag)
        self.bags, width = nn.ModuleList(bags), bags[0].embedding_dim
        self.bottom = _layers([len(schema.dense), *recipe.dense_layers, width])
        rows = len(bags) + 1
        self.pairs = torch.tril_indices(rows, rows, -1)
        self.top = _layers([width + rows * (rows - 1) // 2, *recipe.over_layers])
        self.last = nn.Linear(recipe.over_layers[-1], 1)

    def forward(self, dense: Tensor, ids: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits (B,)."""
        row = self.bottom(dense)
        found = [bag(*one) for bag, one in zip(self.bags, ids, strict=True)]
        rows = torch.stack([row, *found], dim=1)
        dots = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.last(self.top(torch.cat([row, dots], dim=1))).squeeze(1)
        return logits


def _layers(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers)


class RowWise(torch.optim.Optimizer):
    """Row-wise Adagrad: the sum of a row's mean squared gradients scales its steps."""

    def __init__(self, params: Any, lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update; rows without a gradient stay."""
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros(len(p), 1))
                total += p.grad.pow(2).mean(1, keepdim=True)
                p.addcdiv_(p.grad, total.sqrt() + group["eps"], value=-group["lr"])


def auc(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> float:
    """The share of pairs of a click and none whose scores are in order; ties count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    clicks = labels.sum()
    over = ranks[labels == 1].sum() - clicks * (clicks + 1) / 2
    return float(over / (clicks * (len(labels) - clicks)))


def twin_scores(
    folder: Path, recipe: Recipe, seed: int, train: str = "train", held_out: str = "eval"
) -> dict[str, float]:
    """Train the twin as a recipe says, and score it; see `quality_run.scores_of`."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    schema = schema_of(folder, recipe)
    rows, model = read(folder / train, schema), Twin(schema, recipe)
    tables = RowWise if recipe.tables.name == "rowwise_adagrad" else torch.optim.Adagrad
    sparse = tables(model.bags.parameters(), lr=recipe.tables.lr, **recipe.tables.options)
    others = [p for name, p in model.named_parameters() if not name.startswith("bags.")]
    optimizers = [sparse, torch.optim.Adam(others, lr=recipe.dense.lr)]
    steps = recipe.epochs * -(-len(rows.labels) // recipe.batch)
    falls = {"linear": lambda step: 1 - step / steps, "constant": lambda step: 1.0}
    decays = (recipe.tables_decay or recipe.decay, recipe.decay)
    rates = [
        torch.optim.lr_scheduler.LambdaLR(one, falls[decay])
        for one, decay in zip(optimizers, decays, strict=True)
    ]
    for _ in range(recipe.epochs):
        for batch in torch.randperm(len(rows.labels)).split(recipe.batch):
            model.zero_grad()
            logits = model(rows.dense[batch], [column.take(batch) for column in rows.ids])
            functional.binary_cross_entropy_with_logits(logits, rows.labels[batch]).backward()
            for one in (*optimizers, *rates):
                one.step()
    rows = read(folder / held_out, schema)
    with torch.no_grad():
        scored = [
            model(rows.dense[part], [column.take(part) for column in rows.ids])
            for part in torch.arange(len(rows.labels)).split(8192)
        ]
    logits, labels = torch.cat(scored).double(), rows.labels.double()
    loss = functional.binary_cross_entropy_with_logits(logits, labels)
    return {
        "auc": auc(logits.numpy(), labels.numpy()),
        "logloss": float(loss),
        "seconds": time.perf_counter() - began,
    }
