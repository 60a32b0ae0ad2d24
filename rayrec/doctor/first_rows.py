"""`FirstRows`: the rows of a saved table as they began, a function of seed, table and row or id.

The seed is that of the data's cursor, and the bounds are those of the recipe. A run that began from
another one, or went on with another seed, has rows that began otherwise; the checkpoint does not
say so. `TableMeasure` finds that out by the rows that no gradient has reached.
"""

# N rows, C columns

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.checkpoint import Manifest
from rayrec.dynamic.first_values import first_values
from rayrec.errors import ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules.init import table_values
from rayrec.quant import configs_of, reference_collections
from rayrec.serve.recipes import Recipe, recipe_in

NO_RECIPE = (
    "the checkpoint does not say how its rows began: its model is one of the user's code, or of "
    "two towers"
)
NO_SEED = "the checkpoint does not hold the seed of its run"
_AT_A_TIME = 1024
_PROBED = 8  # columns that one step of the generator gives


@dataclass(frozen=True, slots=True)
class FirstRows:
    """First values of the rows of one table."""

    seed: int
    table: BaseEmbeddingConfig

    def match(self, names: Tensor, weight: Tensor, untouched: Tensor | None) -> Tensor:
        """Return (N,) bool, True for rows that are as they began, bit for bit.

        Args:
            names: (N,) row numbers, or ids of a dynamic table.
            untouched: (N,) bool, rows that no gradient has reached, of which a few columns tell.
        """
        probed = range(min(_PROBED, weight.shape[1]))
        few = self._values(names, probed, weight.dtype)
        # nearly all trained rows differ in one value
        is_first = few[:, 0] == weight[:, 0]
        (places,) = is_first.nonzero(as_tuple=True)
        is_first[places] = are_zero(few[places] - weight[places, : probed.stop])
        asked = is_first if untouched is None else is_first & ~untouched
        # so few at a time that their values stay in the cache
        for places in asked.nonzero()[:, 0].split(_AT_A_TIME):
            if len(places):
                whole = self._values(names[places], range(weight.shape[1]), weight.dtype)
                is_first[places] = are_zero(whole - weight[places])
        return is_first

    def _values(self, names: Tensor, cols: range, dtype: torch.dtype) -> Tensor:
        if self.table.dynamic is not None:
            return first_values(self.seed, self.table, names.numpy(), cols).to(dtype)
        span = range(int(names[0]), int(names[-1]) + 1)
        values = table_values(self.seed, self.table, span, cols).to(dtype)
        return values if len(values) == len(names) else values[names - span.start]


def are_zero(values: Tensor) -> Tensor:
    """Return (N,) bool, True for rows of zeros."""
    return (values.amax(1) == 0) & (values.amin(1) == 0)


def first_rows(manifest: Manifest, recipe: Recipe | None) -> Mapping[str, FirstRows | str]:
    """Return the first rows of every table of a checkpoint, or why they are not known."""
    saved = {table.name: table.num_embeddings for table in manifest.tables}
    seed = manifest.cursor.get("seed")
    if recipe is None or not isinstance(seed, int):
        return dict.fromkeys(saved, NO_RECIPE if recipe is None else NO_SEED)
    with torch.random.fork_rng(devices=[]):
        module = recipe()
    configs = [c for one in reference_collections(module).values() for c in configs_of(one)]
    known = {one.name: FirstRows(seed, one.fitting(saved.get(one.name, 0))) for one in configs}
    return {name: known.get(name, "its recipe has no such table") for name in saved}


def recipe_of_checkpoint(manifest: Manifest, source: str) -> Recipe | None:
    """Return the recipe in a checkpoint; None where it has none of a click or next-item model."""
    try:
        return recipe_in(manifest.extras, source)
    except ConfigError:
        return None


def hashed_buckets(schema: FeatureSchema, table: str) -> int | None:
    """Return the buckets into which all features of a table are hashed; None where some are not."""
    names = next((t.feature_names for t in schema.tables if t.name == table), [])
    found = {one.hash_buckets for one in schema.features if one.name in names}
    return found.pop() if len(found) == 1 else None
