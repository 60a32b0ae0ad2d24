"""`linear`: x W^T + b by the faster of torch's two matrix libraries.

torch multiplies float32 matrices with MKL on CPU. On AMD processors oneDNN, which torch carries
too, is as fast or up to twice as fast for the same float32 maths, forward and both gradients. Which
one is taken follows from the processor's maker and the shape alone, and is not timed: two processes
with the same processor take the same kernel for the same shape, so a run that is continued
elsewhere repeats bit for bit. Anything but plain float32 matrices on such a CPU goes to torch:
other devices and types, autocast, torch.compile, torch.func, small products. Second derivatives are
torch's, too.
"""

# B rows, I columns in, O columns out

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SMALL = 1 << 22  # multiplications; below, oneDNN's setup of a call costs more than it gains


@cache
def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def uses_onednn(input: Tensor, weight: Tensor) -> bool:
    """Return True if `linear` of (B, I) and (O, I) runs in oneDNN.

    Every process on this processor gets the same answer.
    """
    return (
        input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
        and input.dim() == 2
        and weight.shape[0] > 1
        # before the size, on which a traced program must not depend
        and not torch.compiler.is_compiling()
        and input.shape[0] * weight.numel() >= _SMALL
        and _is_amd()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and bool(torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available())
    )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """x W^T + b, with gradients.

    Args:
        input: (..., I).
        weight: (O, I).
        bias: (O,).
        relu: clamp the result at 0, which oneDNN does on the way.
    Returns:
        (..., O), as torch.nn.functional.linear; equal to it up to the order of float32 sums.
    """
    if not uses_onednn(input, weight):
        out = functional.linear(input, weight, bias)
        return out.relu() if relu else out
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(input, weight, bias, relu)
    return _product(input, weight, bias, relu)


def _product(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(
        input, weight, bias, "relu" if relu else "none", [], ""
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_BI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, relu: bool
    ) -> Tensor:
        out_BO = _product(input_BI, weight_OI, bias_O, relu)
        ctx.save_for_backward(input_BI, weight_OI, out_BO if relu else None)
        return out_BO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BO,) = grads
        input_BI, weight_OI, out_BO = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        if out_BO is not None:
            grad_BO = torch.ops.aten.threshold_backward(grad_BO, out_BO, 0)
        # somebody will differentiate this gradient, which oneDNN's operators cannot do
        if torch.is_grad_enabled():
            grad_input = grad_BO @ weight_OI if of_input else None
            grad_weight = grad_BO.t() @ input_BI if of_weight else None
            return grad_input, grad_weight, grad_BO.sum(0) if of_bias else None, None
        grad_BO = grad_BO.contiguous()
        grad_input = _product(grad_BO, weight_OI.t()) if of_input else None
        grad_weight = _grad_of_weight(grad_BO, input_BI) if of_weight else None
        return grad_input, grad_weight, grad_BO.sum(0) if of_bias else None, None


def _grad_of_weight(grad_BO: Tensor, input_BI: Tensor) -> Tensor:
    # oneDNN copies its first argument, so that one should be the smaller
    if 2 * input_BI.shape[1] <= grad_BO.shape[1]:
        return _product(input_BI.t(), grad_BO.t()).t().contiguous()
    return _product(grad_BO.t(), input_BI.t())


class FastLinear(nn.Linear):
    """nn.Linear through `linear`: the same parameters, names and initial values."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return linear(input, self.weight, self.bias)

    def forward_relu(self, input: Tensor) -> Tensor:
        """`relu(self(input))` in one pass, unless hooks want to see what comes before the relu."""
        forward = self._forward_hooks or self._forward_pre_hooks
        if forward or self._backward_hooks or self._backward_pre_hooks:
            return self(input).relu()
        return linear(input, self.weight, self.bias, relu=True)
