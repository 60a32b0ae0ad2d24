"""Serving: artifacts exported from checkpoints, and predictors that score rows by them.

It knows neither Ray nor the trainer: a predictor is one process with torch.
"""

from rayrec.serve.artifact import Artifact, open_artifact
from rayrec.serve.bulk import predict_files
from rayrec.serve.export import export
from rayrec.serve.manifest import Manifest
from rayrec.serve.parity import ParityBounds
from rayrec.serve.predictor import Predictor

__all__ = [
    "Artifact",
    "Manifest",
    "ParityBounds",
    "Predictor",
    "export",
    "open_artifact",
    "predict_files",
]
