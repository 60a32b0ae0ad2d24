"""Serving: artifacts exported from checkpoints, and predictors that score rows by them.

It knows neither Ray nor the trainer: a predictor is one process with torch. The names below load on
first use, so that a `Client` works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "Answer": "wire",
    "Artifact": "artifact",
    "Client": "client",
    "Manifest": "manifest",
    "ParityBounds": "parity",
    "Predictor": "predictor",
    "export": "exporting",
    "open_artifact": "artifact",
    "predict_files": "bulk",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
