"""Learning-rate schedules with warm-up: stages that follow each other on one axis of steps.

The learning rate of a step is the base learning rate times the factor of the stage that the step
lies in. Names, defaults and formulas are those of TorchRec's `WarmupOptimizer`: every formula
reads the absolute step i, `max_iters` is the last absolute step of a stage, and after the last
stage the factor is 1. The learning rate is written to the groups of a keyed optimizer, so one
schedule drives dense parameters and tables alike.

The schedule is a function of the step alone (`learning_rate_at`), so a restored run needs no more
than the step number. Left out: schedules that look at the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import CheckpointError, ConfigError
from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper


class WarmupPolicy(Enum):
    """The factor of a stage at the absolute step i; `decay` is `WarmupStage.decay`."""

    NONE = "none"  # 1
    LINEAR = "linear"  # value + (1 - value) * i / max_iters
    CONSTANT = "constant"  # value
    POLY = "poly"  # (1 - i / decay) ** value
    STEP = "step"  # value ** (i // decay)
    INVSQRT = "inv_sqrt"  # i ** -0.5
    # from 1 to value along half a cosine, over and over: i % sgdr_period of sgdr_period steps
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    # from value at start_interpolating_iters to end_value at max_iters, along a straight line
    INTERPOLATE = "interpolate"


@dataclass(frozen=True)
class WarmupStage:
    """One stage of a schedule.

    Attributes:
        policy: the formula.
        max_iters: the last absolute step of the stage; the next stage begins one step later.
        value: what the policy reads, see `WarmupPolicy`.
        lr_scale: an additional factor of the whole stage.
        decay_iters: the steps that POLY and STEP divide by; without one above zero POLY takes
            max_iters and STEP takes 1.
        sgdr_period: steps of one cosine.
        start_interpolating_iters, end_value: INTERPOLATE needs both; other policies ignore them.
    Raises:
        ConfigError: a number of steps or a factor makes no sense.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_iters", "sgdr_period"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"WarmupStage({name}={getattr(self, name)}): it must be 1 or more."
                )
        for name in ("value", "lr_scale", "end_value"):
            number = getattr(self, name)
            if number is not None and not 0 <= number < math.inf:
                raise ConfigError(
                    f"WarmupStage({name}={number}): it must be zero or more, and finite."
                )
        if self.policy is not WarmupPolicy.INTERPOLATE:
            return
        if self.start_interpolating_iters is None or self.end_value is None:
            raise ConfigError(
                "WarmupStage(INTERPOLATE) needs start_interpolating_iters and end_value."
            )
        if self.max_iters <= self.start_interpolating_iters:
            raise ConfigError(
                f"WarmupStage(INTERPOLATE, max_iters={self.max_iters}): it must be above "
                f"start_interpolating_iters={self.start_interpolating_iters}."
            )

    @property
    def decay(self) -> int:
        """The steps that POLY and STEP divide by."""
        if self.decay_iters > 0:
            return self.decay_iters
        return 1 if self.policy is WarmupPolicy.STEP else self.max_iters

    def factor(self, i: int) -> float:
        """Return what the base learning rate is multiplied with at the absolute step `i`."""
        return self.lr_scale * self._policy_factor(i)

    def _policy_factor(self, i: int) -> float:
        match self.policy:
            case WarmupPolicy.NONE:
                return 1.0
            case WarmupPolicy.LINEAR:
                return self.value + (1.0 - self.value) * i / self.max_iters
            case WarmupPolicy.CONSTANT:
                return self.value
            case WarmupPolicy.POLY:
                return math.pow(1 - i / self.decay, self.value)
            case WarmupPolicy.STEP:
                return math.pow(self.value, i // self.decay)
            case WarmupPolicy.INVSQRT:
                return 1.0 / math.sqrt(i)
            case WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
                turn = math.pi * (i % self.sgdr_period) / self.sgdr_period
                return self.value + (1.0 - self.value) * 0.5 * (1 + math.cos(turn))
            case WarmupPolicy.INTERPOLATE:
                assert self.start_interpolating_iters is not None and self.end_value is not None
                first = self.start_interpolating_iters
                way = (self.end_value - self.value) * (i - first)
                return self.value + way / (self.max_iters - first)


def check_stages(stages: Sequence[WarmupStage]) -> None:
    """Check that stages follow each other and that no step has an impossible learning rate.

    Raises:
        ConfigError: `max_iters` does not ascend, or a factor does not exist or is negative at an
            end of its stage, where every formula has its extremes.
    """
    first = 0  # step 0 belongs to the first stage, and step max_iters to the stage that it ends
    for number, stage in enumerate(stages):
        if stage.max_iters < max(first, 1):
            raise ConfigError(
                f"stage {number} ends at step max_iters={stage.max_iters}, the one before it at "
                f"{first - 1}: max_iters is an absolute step, so it must ascend."
            )
        for step in (first, stage.max_iters):
            try:
                factor = stage.factor(step)
            except (ValueError, ZeroDivisionError, OverflowError):
                factor = math.nan
            if not factor >= 0:
                raise ConfigError(
                    f"stage {number} ({stage.policy.name}) has factor {factor} at step {step}; a "
                    f"learning rate must be zero or more. Check value={stage.value}, "
                    f"decay_iters={stage.decay_iters}, and that INVSQRT does not begin at step 0."
                )
        first = stage.max_iters + 1


def learning_rate_at(step: int, lr: float, stages: Sequence[WarmupStage]) -> float:
    """Return the learning rate of the step after `step` steps have been made.

    Args:
        step: from 0 on.
        lr: base learning rate, which also holds after the last stage.
        stages: in order.
    """
    for stage in stages:
        if step <= stage.max_iters:
            return lr * stage.factor(step)
    return lr


class WarmupOptimizer(OptimizerWrapper):
    """An optimizer whose learning rate follows stages.

    Args:
        optimizer: its groups' learning rates are written, the first one at once.
        stages: of the schedule.
        lr: base learning rate of every group; None takes each group's own, as it is now.
        lr_param: the key of the learning rate in a group.
        param_name: the name under which the state_dict holds the step.
    Raises:
        ConfigError: see `check_stages`; or a group has no `lr_param`, or `param_name` is taken.

    The state_dict has {"warmup": tensor([step, stage])} under `param_name`, beside the states of
    parameters.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float | None = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        check_stages(stages)
        if param_name in self.params:
            raise ConfigError(
                f"WarmupOptimizer(param_name={param_name!r}): a parameter has this "
                "name; choose another."
            )
        if any(lr_param not in group for group in self.param_groups):
            raise ConfigError(
                f"WarmupOptimizer(lr_param={lr_param!r}): a group of the optimizer "
                "has no such option."
            )
        # An empty parameter, under whose name a state_dict keeps the step.
        self.params[param_name] = torch.nn.Parameter(torch.empty(0))
        self._stages, self._lr_param, self._param_name = tuple(stages), lr_param, param_name
        self._base = [float(group[lr_param]) if lr is None else lr for group in self.param_groups]
        self._step = 0
        self._write()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, then move the learning rate on."""
        super().step(closure)
        self._step += 1
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the step."""
        inner = super().state_dict()
        return {
            **inner,
            "state": {**inner["state"], self._param_name: {"warmup": self._progress()}},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the inner state and the step, and the learning rate that belongs to it.

        Raises:
            CheckpointError: the state_dict has no step, or is not the inner optimizer's.
        """
        state = dict(state_dict["state"])
        own = state.pop(self._param_name, None)
        if not isinstance(own, Mapping) or "warmup" not in own:
            raise CheckpointError(
                f"the optimizer state to load has no {self._param_name!r}: it "
                "was saved without a schedule."
            )
        super().load_state_dict({**state_dict, "state": state})
        self._step = int(own["warmup"][0])
        self._write()

    def _progress(self) -> Tensor:
        stage = sum(self._step > stage.max_iters for stage in self._stages)
        return torch.tensor([self._step, stage])

    def _write(self) -> None:
        for group, base in zip(self.param_groups, self._base, strict=True):
            group[self._lr_param] = learning_rate_at(self._step, base, self._stages)
