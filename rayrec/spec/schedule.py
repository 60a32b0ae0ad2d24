"""Learning-rate schedules as plain data: stages that follow each other on one axis of steps.

The learning rate of a step is the base learning rate times the factor of the stage that the step
lies in. Names, defaults and formulas are those of TorchRec's `WarmupOptimizer`: every formula
reads the absolute step i, `max_iters` is the last absolute step of a stage, and after the last
stage the factor is 1. A schedule is a function of the step alone, so a run that is resumed needs no
more than the step number. `ScheduleConfig` is a common schedule in words, for a run whose length is
not known yet. Left out: schedules that look at the loss. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

FOREVER = 2**62  # a step that no run reaches


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
        value: number that the policy reads, see `WarmupPolicy`.
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
        check_fields(self)
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
        step: number of steps made, from 0 on.
        lr: base learning rate, which also holds after the last stage.
        stages: stages of a schedule, in order.
    """
    for stage in stages:
        if step <= stage.max_iters:
            return lr * stage.factor(step)
    return lr


Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """A schedule over all steps of a run, as run files and command lines say it.

    Attributes:
        decay: shape of the learning rate's fall until the run's last step.
        warmup: steps in which it grows from 0 to its full size.
        floor: the factor at the end of a decay.
    Raises:
        ConfigError: a number makes no sense.
    """

    decay: Decay = "constant"
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup < 0:
            raise ConfigError(f"ScheduleConfig has warmup={self.warmup}; it must be at least 0.")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"ScheduleConfig has floor={self.floor}; it must be from 0 to 1.")

    def stages(self, steps: int) -> tuple[WarmupStage, ...]:
        """The stages of a run of so many steps; see `schedule`."""
        return schedule(steps, warmup=self.warmup, decay=self.decay, floor=self.floor)


Schedule = tuple[WarmupStage, ...] | ScheduleConfig


def stages_of(said: Schedule, steps: int) -> tuple[WarmupStage, ...]:
    """The stages of a schedule over a run of so many steps; none keep the learning rate.

    A run of no steps only evaluates, and has none.

    Raises:
        ConfigError: the warm-up is as long as the run.
    """
    if isinstance(said, ScheduleConfig):
        return said.stages(steps) if steps else ()
    return said


def schedule(
    steps: int,
    *,
    warmup: int = 0,
    decay: Literal["constant", "linear", "cosine", "poly", "step"] = "constant",
    floor: float = 0.0,
    power: float = 2.0,
    every: int | None = None,
) -> tuple[WarmupStage, ...]:
    """Return the stages of a common schedule: a straight warm-up, then a decay until `steps`.

    Args:
        steps: the last step of the schedule; after it the learning rate is that of its end.
        warmup: steps in which the factor grows from 0 to 1.
        decay: "linear" falls straight to `floor`; "cosine" falls to it along half a cosine; "poly"
            is (1 - i / steps) ** power; "step" multiplies by `floor` after every `every` steps.
        floor: the factor at the end; of "step" the factor of one fall.
        power: exponent of "poly".
        every: steps between two falls of "step".
    Raises:
        ConfigError: the numbers make no schedule.
    """
    if not 0 <= warmup < steps:
        raise ConfigError(
            f"schedule(steps={steps}, warmup={warmup}): the warm-up must end before the schedule."
        )
    if (every is None) == (decay == "step"):
        raise ConfigError(
            f"schedule(decay={decay!r}, every={every}): every is the number of steps between two "
            'falls; decay="step" needs it, and no other decay reads it.'
        )
    policy = WarmupPolicy
    rise = WarmupStage(policy.INTERPOLATE, warmup, 0.0, 1.0, -1, 1, 0, 1.0) if warmup else None
    if decay == "constant":
        fall = WarmupStage(policy.NONE, steps)
    elif decay == "linear":
        fall = WarmupStage(policy.INTERPOLATE, steps, 1.0, 1.0, -1, 1, warmup, floor)
    elif decay == "cosine":
        # the policy reads the absolute step, so a half period is as long as the whole schedule
        fall = WarmupStage(
            policy.COSINE_ANNEALING_WARM_RESTARTS, steps, floor, sgdr_period=steps + 1
        )
    elif decay == "poly":
        fall = WarmupStage(policy.POLY, steps, power, decay_iters=steps + 1)
    elif decay == "step":
        fall = WarmupStage(policy.STEP, steps, floor, decay_iters=every or 1)
    else:
        raise ConfigError(
            f"schedule(decay={decay!r}): choose constant, linear, cosine, poly, step."
        )
    end = WarmupStage(policy.CONSTANT, FOREVER, fall.factor(steps))
    stages = [stage for stage in (rise, fall, end) if stage is not None]
    check_stages(stages)
    return tuple(stages)
