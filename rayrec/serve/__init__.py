"""Serving: artifacts exported from checkpoints, and predictors that score rows by them.

It knows neither Ray nor the trainer: a predictor is one process with torch. The names below load on
first use, so that a `Client` works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.lazy import lazy_names

if TYPE_CHECKING:
    from rayrec.serve.artifact import Artifact, open_artifact
    from rayrec.serve.bulk import predict_files
    from rayrec.serve.client import Client
    from rayrec.serve.exporting import export
    from rayrec.serve.manifest import Manifest
    from rayrec.serve.parity import ParityBounds
    from rayrec.serve.predictor import Predictor
    from rayrec.serve.wire import Answer

_HOME = {
    "Answer": "rayrec.serve.wire",
    "Artifact": "rayrec.serve.artifact",
    "Client": "rayrec.serve.client",
    "Manifest": "rayrec.serve.manifest",
    "ParityBounds": "rayrec.serve.parity",
    "Predictor": "rayrec.serve.predictor",
    "export": "rayrec.serve.exporting",
    "open_artifact": "rayrec.serve.artifact",
    "predict_files": "rayrec.serve.bulk",
}
__all__ = [
    "Answer",
    "Artifact",
    "Client",
    "Manifest",
    "ParityBounds",
    "Predictor",
    "export",
    "open_artifact",
    "predict_files",
]
__getattr__ = lazy_names(__name__, _HOME)
