"""Worlds for the tests of served next-item models: a checkpoint, and the model in plain torch."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.layout import EmbeddingConfig
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from tests.unit.checkpoint_worlds import Truth, random_plan, save_world

ITEMS, WIDTH, LONGEST = 37, 16, 6
Row = dict[str, Any]


def schema_text() -> str:
    """A log's schema, with a column and a table that the model does not read."""
    lists = [{"name": "at", "column": "time", "history": LONGEST}]
    lists.append({"name": "seen", "column": "item", "history": 20})
    names = ["history", "item"]
    features = [
        {"name": "history", "column": "item", "history": LONGEST},
        {"name": "item", "column": "item"},
        {"name": "country", "column": "country"},
    ]
    tables = [
        {"name": "song", "num_embeddings": ITEMS, "features": names, "pooling": "none"},
        {"name": "country", "num_embeddings": 5, "features": ["country"]},
    ]
    return json.dumps(
        {
            "label": "played",
            "user": "user",
            "time": "time",
            "dense": [{"column": "age"}],
            "features": features,
            "sequences": lists,
            "tables": [{**table, "embedding_dim": WIDTH} for table in tables],
        }
    )


class NextItemWorld(NamedTuple):
    """A saved checkpoint, and what was saved."""

    checkpoint: str
    recipe: NextItemRecipe
    encoder: nn.Module
    table: Tensor
    bias: Tensor
    listed: list[int]

    def scores(self, row: Row) -> Tensor:
        """Of all items after the history of one row, in plain torch."""
        past, times = row["history"][-LONGEST:], row["at"][-LONGEST:]
        if not past:
            return self.bias
        offsets = torch.tensor([0, len(past)])
        with torch.no_grad():
            states = self.encoder(self.table[past], offsets, torch.tensor(times), None)
            return self.table @ states[-1] + self.bias


def next_item_world(folder: Path, seed: int, model: NextItemModel, equal: int = 0) -> NextItemWorld:
    """Save a random model; the first `equal` items have one row and one bias."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    recipe = NextItemRecipe(schema=schema_text(), model=model, counts=np.arange(ITEMS) % 12)
    module = recipe().eval()
    table, bias = torch.randn(ITEMS, WIDTH), torch.randn(ITEMS)
    table[:equal], bias[:equal] = table[:1], bias[:1]
    dense = {}
    for name, p in module.named_parameters():
        if "embeddings" in name:
            continue
        with torch.no_grad():
            p.add_(torch.randn(p.shape) * 0.3)
        dense[name] = p.detach().clone()
    dense |= {"model.bias": bias, "model.listed": module.model.listed.clone()}
    listed = module.model.listed.nonzero().squeeze(1).tolist()
    config = EmbeddingConfig(ITEMS, WIDTH, "song", feature_names=["history", "item", "candidates"])
    truth = Truth(config, "row", table, torch.rand(table.shape, dtype=torch.float64))
    path = str(folder / "step-00000009")
    plan = random_plan(rng, [truth], 2)
    save_world(path, [truth], plan, dense=dense, extras=recipe.to_extras(), batch_bytes=1 << 20)
    return NextItemWorld(path, recipe, module.model.encoder, table, bias, listed)


def random_rows(seed: int, lengths: Sequence[int] = (0, 1, 2, 5, 6, 9, 0, 1)) -> list[Row]:
    """Rows with histories of these lengths, and an item each."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        past = rng.integers(0, ITEMS, length).tolist()
        at = np.cumsum(rng.integers(1, 10**6, length)).tolist()
        seen = rng.integers(0, ITEMS, 4).tolist()
        rows.append({"history": past, "at": at, "seen": seen, "item": int(rng.integers(ITEMS))})
    return rows
