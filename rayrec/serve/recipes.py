"""Recipes of the models that are served, as checkpoints and artifacts carry them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.next_item_recipe import KIND, NEXT_ITEM, NextItemRecipe
from rayrec.recipe import ModelRecipe

Recipe = ModelRecipe | NextItemRecipe


def recipe_in(extras: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe in the extras of a checkpoint.

    Raises:
        ConfigError: there is none, or it is of a model that is not served.
    """
    kind = NextItemRecipe if KIND in extras else ModelRecipe
    return kind.from_extras(extras, source)


def recipe_of(fields: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe of an artifact, from the fields that its manifest has.

    Raises:
        ConfigError: they are those of no recipe.
    """
    kind = KIND if fields.get("model") in NEXT_ITEM else "recipe"
    return recipe_in({kind: fields}, source)


def fields_of_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the fields by which `recipe_of` makes a recipe again."""
    (fields,) = recipe.to_extras().values()
    return dict(fields)


def has_recipe(model: object, extras: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint of a model holds its recipe, so that no code builds it."""
    return isinstance(model, ModelRecipe | NextItemRecipe) and not extras.keys().isdisjoint(
        model.to_extras()
    )
