"""Dense parameters without a gradient, right on several ranks under DistributedDataParallel.

DDP averages a bucket of gradients once every parameter in it has one, so a parameter that a step
does not use holds up its bucket. Two things mend that at no message and no walk over the graph:

- `reach_all` hangs all parameters below the model's output. The backward pass then reaches each of
  them, the unused ones at once and without a gradient, and DDP counts them.
- `mark_unused` writes negative zero into the bucket where this rank has no gradient, and never
  there where it has one: its first element is made a positive zero if it is a zero. A sum is a
  negative zero only if every addend is, so after the average a rank sees in the first element
  whether any rank had a gradient. If none had, the parameter's gradient is None again, as on one
  rank, and an optimizer with a momentum or a decay passes it over.

Cost of a step: one more node per output, one small operator per bucket; outputs of up to
`CLONED_ELEMENTS` elements are copied. A rank looks at sums only where it lacked a gradient itself.
Source: find_unused_parameters of DistributedDataParallel does this by a walk over the graph and by
one more all-reduce.
"""

import copy  # no postponed annotations: DistributedDataParallel looks at those of hooks
import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.utils import _pytree as pytree

Hook = Callable[[Any, GradBucket], Future[Tensor]]

# A larger output is a view, which torch does not let anybody change in place.
CLONED_ELEMENTS = 1 << 16


class _AllParameters(torch.autograd.Function):
    """Join all parameters to an empty tensor; its backward pass gives them no gradient.

    No parameter gets its gradient before that has run, so `begin` is called ahead of all of them.
    """

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *parameters: Tensor) -> Tensor:
        ctx.begin, ctx.count = begin, len(parameters)
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.begin()
        return (None,) * (ctx.count + 1)


class _Through(torch.autograd.Function):
    """Pass an output through, and hang `below` under it in the graph."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, below: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return output.clone() if output.numel() <= CLONED_ELEMENTS else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return grads[0], None


def reach_all(
    output: Any, parameters: Sequence[Tensor], begin: Callable[[], None] = lambda: None
) -> Any:
    """Return the output of a forward pass, whose backward pass reaches all of `parameters`.

    Args:
        output: tensors in tuples, lists, dicts, dataclasses and registered pytrees of any depth;
            tensors in other objects are left as they are.
        parameters: leaves; at least one.
        begin: called by each backward pass, before any of the parameters gets its gradient.
    Returns:
        The same structure. Tensors that need a gradient are new ones with the same values.
    """
    below = _AllParameters.apply(begin, *parameters)
    _spare_hooks(parameters)

    def through(part: Any) -> Any:
        if isinstance(part, Tensor):
            return _Through.apply(part, below) if part.requires_grad else part
        if type(part) in (tuple, list):  # a shorter way than the general one
            return type(part)(map(through, part))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            changed = copy.copy(part)
            for field in dataclasses.fields(part):
                object.__setattr__(changed, field.name, through(getattr(part, field.name, None)))
            return changed
        leaves, form = pytree.tree_flatten(part)
        alone = len(leaves) == 1 and leaves[0] is part
        return part if alone else pytree.tree_unflatten(map(through, leaves), form)

    return through(output)


class _NotWithout:
    """A hook on a parameter's gradient that is not called where there is none, as on one rank."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self._hook(grad)


def _spare_hooks(parameters: Sequence[Tensor]) -> None:
    """Keep None, which torch passes for a missing gradient, from `Tensor.register_hook`'s hooks."""
    for p in parameters:
        hooks = p._backward_hooks or {}  # torch reads this dict in the backward pass
        for key, hook in hooks.items():
            if not isinstance(hook, _NotWithout):
                hooks[key] = _NotWithout(hook)


def with_unused(hook: Hook) -> Hook:
    """Wrap a communication hook: a parameter without a gradient on all ranks stays without one.

    Args:
        hook: averages the bucket, element by element.
    """

    def run(state: Any, bucket: GradBucket) -> Future[Tensor]:
        unused = mark_unused(bucket)
        if unused:
            # DDP writes the averages into .grad in a callback that it queues after this one
            _after_backward(partial(_after_backward, partial(_forget, unused)))
        return hook(state, bucket)

    return run


def mark_unused(bucket: GradBucket) -> list[Tensor]:
    """Mark in the bucket what this rank has a gradient of; return the parameters without one."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.layout is not torch.strided or not buffer.is_floating_point():
        return []  # DDP lets no sparse gradient be missing
    firsts = _firsts(tuple(p.numel() for p in parameters), buffer.device)
    # adding 0.0 makes a positive zero of a negative one and keeps every other value
    buffer.index_copy_(0, firsts, buffer.index_select(0, firsts) + 0.0)
    unused = []
    for parameter, grad in zip(parameters, bucket.gradients(), strict=True):
        if parameter.grad is None and parameter.numel():
            grad.fill_(-0.0)
            unused.append(parameter)
    return unused


@lru_cache(maxsize=256)
def _firsts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first element of each parameter that has any, in a bucket of these sizes."""
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True) if size]
    return torch.tensor(starts, dtype=torch.int64, device=device)


def _forget(parameters: Sequence[Tensor]) -> None:
    """Take away the gradients that no rank had."""
    for p in parameters:
        if p.grad is None:
            continue
        first = p.grad.detach().reshape(-1)[0]
        if bool((first == 0) & torch.signbit(first)):
            p.grad = None


def _after_backward(task: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(task)
