"""One training step: forward, scaled backward with the tables' update inside, dense update.

The weight of the loss is the one subtle thing. The loss is a mean over the local rows n_r, DDP
averages dense gradients over W ranks and the sharded tables divide their summed gradients by W.
With loss * n_r * W / G, G rows in the global batch, both give the exact mean over the global batch,
also when ranks hold different numbers of rows in the last batch, or none. No host sync here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.observe.timer import span


class StepResult(NamedTuple):
    """What a step leaves behind, detached and still on the device.

    Attributes:
        loss_sum: () sum of the loss over the local rows; 0 when there are none.
        rows: local rows.
        logits: predictions before the update, as the model gave them: (rows,), or by task.
        labels: what they should have been, likewise.
    """

    loss_sum: Tensor
    rows: int
    logits: Any
    labels: Any

    @classmethod
    def told(cls, loss: Tensor, logits: Any, labels: Any, rows: int) -> StepResult:
        """A step as a user's loop tells of it; without logits and labels nothing is scored."""
        if logits is None or labels is None:
            logits = labels = {}
        return summarize((loss, logits, labels), rows)


def train_step(
    model: nn.Module, dense_optimizer: torch.optim.Optimizer | None, batch: Any, world_size: int
) -> StepResult:
    """Do one step; every rank of the world must call it for its part of the same global batch.

    Args:
        model: forward(batch) -> (loss, (loss, logits, labels)), loss the mean over the batch's
            rows; tables update in the backward.
        dense_optimizer: of the other parameters; None when there are none.
        batch: `.rows` local rows of `.global_rows`.
        world_size: W, the number of ranks.
    Raises:
        ConfigError: the model's output has another form.
    """
    timer = model.timer if isinstance(model, DistributedModelParallel) else None
    if dense_optimizer is not None:
        dense_optimizer.zero_grad(set_to_none=True)
    with span(timer, "dense"):
        result = forward(model, batch)
    with span(timer, "backward"):
        (result[0] * loss_weight(batch, world_size)).backward()
    if dense_optimizer is not None:
        with span(timer, "optimizer"):
            dense_optimizer.step()
    return summarize(result, batch.rows)


def loss_weight(batch: Any, world_size: int) -> float:
    """What a rank's mean loss is multiplied by, so that ranks together train on the global mean.

    A batch without `rows` and `global_rows` counts as one of equal parts.
    """
    rows, global_rows = getattr(batch, "rows", None), getattr(batch, "global_rows", None)
    if rows is None or global_rows is None:
        return 1.0
    return rows * world_size / max(1, global_rows)


def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
    """The model's output of a batch, as `checked` returns it."""
    return checked(model(batch))


def checked(output: Any) -> tuple[Tensor, Any, Any]:
    """(loss (), logits, labels) of what a model's forward returned.

    Raises:
        ConfigError: it is not (loss, (loss, logits, labels)).
    """
    try:
        loss, (_, logits, labels) = output
    except (TypeError, ValueError):
        raise ConfigError(
            f"the model's forward(batch) returned {type(output).__name__}; training needs (loss, "
            "(loss, logits, labels)). Wrap the network as rayrec.models.DLRMTrain does."
        ) from None
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise ConfigError(
            f"the model returned loss {tuple(getattr(loss, 'shape', ()))}; training needs a scalar "
            "tensor, the mean over the rows of the batch."
        )
    return loss, logits, labels


def summarize(result: tuple[Tensor, Any, Any], rows: int) -> StepResult:
    """Detach a forward's result; the mean loss of no rows counts as 0."""
    loss, logits, labels = (_detached(value) for value in result)
    loss_sum = torch.zeros((), dtype=torch.float64, device=loss.device)
    # the mean of no rows is not a number
    if rows:
        loss_sum = loss.double() * rows
    return StepResult(loss_sum, rows, logits, labels)


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: tensor.detach() for name, tensor in value.items()}
    return value.detach()
