"""The click model of `jobs.train_dlrm`; its home is `rayrec.recipe`."""

from rayrec.recipe import MODELS, ModelRecipe

__all__ = ["MODELS", "ModelRecipe"]
