"""Row-wise Adagrad as a torch optimizer, for dense tensors such as tables that are not sharded.

Formula, defaults and state are those of `torchrec.optim.rowwise_adagrad.RowWiseAdagrad`. Its name
here has Dense before it, since `rayrec.optim.RowWiseAdagrad` is the one that lookup kernels apply.
They differ in two points: here every row decays and every row's state moves in each step, and eps
is 1e-10 by default, 1e-8 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import ConfigError


class DenseRowWiseAdagrad(torch.optim.Optimizer):
    """s += mean(g^2) of a row; w -= lr / (1 + (t - 1) lr_decay) * g / (sqrt(s) + eps).

    Args:
        params: parameters of two dimensions, or groups of them.
        lr: learning rate.
        lr_decay: see the formula; t counts the steps of a parameter from 1 on.
        weight_decay: added to the gradient, times the weight.
        initial_accumulator_value: first value of s.
        eps: see the formula.
        maximize: follow the gradient upwards.
    Raises:
        ConfigError: a number is negative, or a parameter has not two dimensions.

    State of a parameter: "sum" (rows, 1) and "step" ().
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        for name, value in options.items():
            if not value >= 0:
                raise ConfigError(f"DenseRowWiseAdagrad({name}={value}): it must be zero or more.")
        super().__init__(params, {**options, "maximize": maximize})
        for group in self.param_groups:
            for p in group["params"]:
                self._start(p, group["initial_accumulator_value"])

    def _start(self, p: Tensor, value: float) -> None:
        if p.dim() != 2:
            raise ConfigError(
                "DenseRowWiseAdagrad has one state per row of a matrix; a parameter has shape "
                f"{tuple(p.shape)}. "
                "Give such parameters to torch.optim.Adagrad."
            )
        self.state[p] = {
            "step": torch.tensor(0.0),
            "sum": p.detach().new_full((p.shape[0], 1), value),
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again, with gradients.
        Returns:
            What `closure` returned.
        Raises:
            ConfigError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.is_sparse:
            raise ConfigError(
                "DenseRowWiseAdagrad takes no sparse gradients; build the embedding "
                "with sparse=False."
            )
        state = self.state[p]
        state["step"] += 1
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"]:
            grad = grad.add(p, alpha=group["weight_decay"])
        state["sum"] += grad.square().mean(1, keepdim=True)
        rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        p.addcdiv_(grad, state["sum"].sqrt().add_(group["eps"]), value=-rate)
