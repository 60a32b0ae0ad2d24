"""The dense part of a model as a checkpoint sees it: its tensors by name, and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import CheckpointError, ConfigError


def dense_tensors(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Live dense parameters and persistent buffers by the names of the user's module.

    The tensors share memory with the model, so that writing to them restores it.
    """
    tensors = {name: p.detach() for name, p in model.dense_parameters()}
    for path, module in model.module.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = buffer
    return tensors


@torch.no_grad()
def load_dense(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: str) -> None:
    """Copy saved tensors into the live ones.

    Raises:
        CheckpointError: names or shapes differ; names the tensor and `path`.
    """
    if set(live) != set(saved):
        odd = sorted(set(live) ^ set(saved))[0]
        raise CheckpointError(
            f"{path} and the model differ in {odd!r}, which only one of them has. Build the model "
            "that was saved."
        )
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointError(
                f"{path} holds {name!r} as {tuple(saved[name].shape)}, the model wants "
                f"{tuple(tensor.shape)}."
            )
        tensor.copy_(saved[name])


def check_dense_optimizer(extras: Mapping[str, Any], wanted: str, path: str) -> None:
    """Check that a checkpoint's dense optimizer is the one that this run uses.

    Args:
        extras: what the checkpoint at `path` keeps besides weights.
        wanted: the name of the run's dense optimizer.
    Raises:
        ConfigError: it was trained with another one.
    """
    saved = extras.get("dense_optimizer", wanted)
    if saved != wanted:
        raise ConfigError(
            f"{path} was trained with the dense optimizer {saved!r}, the run wants {wanted!r}. Use "
            f"{saved!r}, or start a new run from its weights alone with init_from (--init-from)."
        )
