"""This folder's tests exist only on the stand-in device, where they are marked `gpu`."""

from __future__ import annotations

import os

import pytest

if os.environ.get("RAYREC_CUDA_DRY") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, and put those that watch streams last: from then on torch keeps its hooks."""
    for item in items:
        if "cuda_dry" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
    items.sort(key=lambda item: item.path.name == "test_streams.py")
