"""Check of a checkpoint's dense optimizer against that of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.errors import ConfigError


def check_dense_optimizer(extras: Mapping[str, Any], wanted: str, path: str) -> None:
    """Check that a checkpoint's dense optimizer is the one that this run uses.

    Args:
        extras: JSON data that the checkpoint at `path` carries.
        wanted: the name of the run's dense optimizer.
    Raises:
        ConfigError: it was trained with another one.
    """
    saved = extras.get("dense_optimizer", wanted)
    if saved != wanted:
        raise ConfigError(
            f"{path} was trained with the dense optimizer {saved!r}, the run wants {wanted!r}. Use "
            f"{saved!r}, or start a new run from its weights alone with init_from."
        )
