"""One training step: forward, scaled backward with the tables' update inside, dense update.

The weight of the loss is the one subtle thing. The loss is a mean over the local rows n_r, DDP
averages dense gradients over W ranks and the sharded tables divide their summed gradients by W.
With loss * n_r * W / G, G rows in the global batch, both give the exact mean over the global batch,
also when ranks hold different numbers of rows in the last batch, or none. No host sync here.

Where the loss is a mean over something else, such as tokens, the model says over how many: by a
method `loss_count(batch)`, called after the forward pass of the batch. Ranks add their counts up,
in one small collective per step, and the counts take the place of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.observe.timer import span

Rows = float | Tensor | None


class StepResult(NamedTuple):
    """Result of a step, detached and still on the device.

    Attributes:
        loss_sum: () the loss times the rows of the global batch that it stands for, which are the
            local ones where the loss is a mean over rows; 0 when there are none.
        rows: local rows.
        logits: predictions before the update, as the model gave them: (rows,), or by task.
        labels: labels of the same rows, in the same form.
    """

    loss_sum: Tensor
    rows: int
    logits: Any
    labels: Any


class Share(NamedTuple):
    """A rank's part in the mean over the global batch.

    Attributes:
        weight: factor of the rank's loss, whose gradients are then averaged over ranks.
        rows: rows of the global batch that the loss stands for; None where they are not known.
    """

    weight: float | Tensor
    rows: Rows


def train_step(
    model: nn.Module, dense_optimizer: torch.optim.Optimizer | None, batch: Any, world_size: int
) -> StepResult:
    """Do one step; every rank of the world must call it for its part of the same global batch.

    Args:
        model: forward(batch) -> (loss, (loss, logits, labels)), loss the mean over the batch's
            rows; tables update in the backward.
        dense_optimizer: optimizer of the other parameters; None when there are none.
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
        share = share_of(model, batch, world_size, result[0].device)
        (result[0] * share.weight).backward()
    if dense_optimizer is not None:
        with span(timer, "optimizer"):
            dense_optimizer.step()
    return summarize(result, batch.rows, share.rows)


def share_of(model: nn.Module, batch: Any, world_size: int, device: torch.device) -> Share:
    """Return the weight of a rank's loss, with which all ranks train on the global mean.

    All ranks call it after the forward pass. A batch without `rows` and `global_rows` counts as one
    of equal parts, unless the model has a `loss_count`.

    Raises:
        ConfigError: the model's `loss_count` gives no number.
    """
    rows, global_rows = getattr(batch, "rows", None), getattr(batch, "global_rows", None)
    counter = _counter(model)
    if counter is not None:
        own = _number(counter(batch), device)
        total = own.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        part = own / total.where(total > 0, 1.0)
        return Share(part * world_size, None if global_rows is None else part * global_rows)
    if rows is None or global_rows is None:
        return Share(1.0, rows)
    return Share(rows * world_size / max(1, global_rows), rows)


def _counter(model: Any) -> Callable[[Any], Any] | None:
    """Return the method `loss_count` of a model, or of the module inside of it, or None."""
    while model is not None:
        counter = getattr(model, "loss_count", None)
        if callable(counter):
            return counter
        model = getattr(model, "module", None)
    return None


def _number(count: Any, device: torch.device) -> Tensor:
    if not isinstance(count, int | float | Tensor) or (isinstance(count, Tensor) and count.dim()):
        raise ConfigError(
            f"the model's loss_count(batch) gave {type(count).__name__} "
            f"{tuple(getattr(count, 'shape', ()))}; it must give one number, of what its loss is "
            "the mean over: mask.sum(), for example."
        )
    return torch.as_tensor(count, dtype=torch.float64, device=device).detach()


def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
    """Run the model's forward on a batch, and return its checked output."""
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


def summarize(result: tuple[Tensor, Any, Any], rows: int, stands_for: Rows = None) -> StepResult:
    """Detach a forward's result; the mean loss of no rows counts as 0."""
    loss, logits, labels = (_detached(value) for value in result)
    loss_sum = torch.zeros((), dtype=torch.float64, device=loss.device)
    # the mean of no rows is not a number, and neither may be that of no tokens
    if isinstance(stands_for, Tensor):
        loss_sum = (loss.double() * stands_for).where(stands_for > 0, 0.0)
    elif rows:
        loss_sum = loss.double() * rows
    return StepResult(loss_sum, rows, logits, labels)


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: tensor.detach() for name, tensor in value.items()}
    return value.detach()
