"""Loading of a checkpoint's dense tensors into a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rayrec.errors import CheckpointError


def dense_tensors(
    parameters: Iterable[tuple[str, nn.Parameter]], module: nn.Module
) -> dict[str, Tensor]:
    """Live dense parameters and the persistent buffers of a module, by name.

    The tensors share memory with the module, so that writing to them restores it.

    Args:
        parameters: names and dense parameters of the module.
    """
    tensors = {name: p.detach() for name, p in parameters}
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
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
