"""The click model of `jobs.train_dlrm`; its home is `rayrec.runs.recipe`."""

from rayrec.runs.recipe import MODELS, ModelRecipe

__all__ = ["MODELS", "ModelRecipe"]
