"""Learning-rate schedules with warm-up: a list of stages, each a formula over its own steps.

The learning rate of a step is base lr * lr_scale of the stage * its policy's factor. It is written to the groups of a keyed optimizer, so
one schedule drives dense parameters and tables alike. Stage terms are those of TorchRec's WarmupOptimizer. After the last stage its
last factor stays.

The schedule is a function of the step alone (`learning_rate_at`), so a restored run needs no more than the step number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rayrec.errors import CheckpointError, ConfigError
from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper


class WarmupPolicy(Enum):
    """The factor of a stage after i of its n = max_iters steps."""

    NONE = "none"  # 1
    LINEAR = "linear"  # from value to 1: value + (1 - value) * i / n
    CONSTANT = "constant"  # value
    POLY = "poly"  # (1 - i / n) ** value
    STEP = "step"  # value ** (i // decay_iters)
    INVSQRT = "inv_sqrt"  # (i + 1) ** -0.5
    COSINE = "cosine"  # from 1 to value along half a cosine, over and over each sgdr_period steps


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupStage:
    """One stage of a schedule.

    Attributes:
        policy: its formula.
        max_iters: steps of the stage.
        value: what the policy reads, see `WarmupPolicy`.
        lr_scale: scales the stage.
        sgdr_period: steps of one cosine; max_iters when None.
        decay_iters: steps between the drops of STEP; max_iters when None.
    Raises:
        ConfigError: a number of steps is not positive, or `value` makes no learning rate.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 0.0
    lr_scale: float = 1.0
    sgdr_period: int | None = None
    decay_iters: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_iters", "sgdr_period", "decay_iters"):
            steps = getattr(self, name)
            if steps is not None and steps < 1:
                raise ConfigError(f"WarmupStage({name}={steps}): a stage needs at least one step.")
        if not (0 <= self.value < math.inf and 0 <= self.lr_scale < math.inf):
            raise ConfigError(f"WarmupStage(value={self.value}, lr_scale={self.lr_scale}): both must be zero or more, and finite.")

    def factor(self, i: int) -> float:
        """What the base learning rate is multiplied with after `i` steps of this stage, 0 <= i <= max_iters."""
        return self.lr_scale * self._policy_factor(i)

    def _policy_factor(self, i: int) -> float:
        n = self.max_iters
        match self.policy:
            case WarmupPolicy.NONE:
                return 1.0
            case WarmupPolicy.LINEAR:
                return self.value + (1.0 - self.value) * i / n
            case WarmupPolicy.CONSTANT:
                return self.value
            case WarmupPolicy.POLY:
                return (1.0 - i / n) ** self.value
            case WarmupPolicy.STEP:
                return self.value ** (i // (self.decay_iters or n))
            case WarmupPolicy.INVSQRT:
                return (i + 1) ** -0.5
            case WarmupPolicy.COSINE:
                period = self.sgdr_period or n
                within = i % period if i < n or n % period else period
                return self.value + (1.0 - self.value) * (1.0 + math.cos(math.pi * within / period)) / 2


def learning_rate_at(step: int, lr: float, stages: Sequence[WarmupStage]) -> float:
    """The learning rate of the step after `step` steps have been made.

    Args:
        step: from 0 on.
        lr: base learning rate.
        stages: in order; after the last one its last factor stays.
    """
    for stage in stages:
        if step < stage.max_iters:
            return lr * stage.factor(step)
        step -= stage.max_iters
    return lr * stages[-1].factor(stages[-1].max_iters) if stages else lr


class WarmupOptimizer(OptimizerWrapper):
    """An optimizer whose learning rate follows stages.

    Args:
        optimizer: its groups' learning rates are written.
        stages: of the schedule.
        lr: base learning rate of every group; None: each group's own, as it is now.

    The state_dict has the step under the key `__warmup`, beside the inner optimizer's.
    """

    KEY = "__warmup"

    def __init__(self, optimizer: KeyedOptimizer, stages: Sequence[WarmupStage], lr: float | None = None) -> None:
        super().__init__(optimizer)
        self._stages = tuple(stages)
        self._base = [float(group["lr"]) if lr is None else lr for group in self.param_groups]
        self._step = 0
        self._write()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, then move the learning rate on."""
        super().step(closure)
        self._step += 1
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the step."""
        return {**super().state_dict(), self.KEY: {"step": self._step}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the inner state and the step, and the learning rate that belongs to it.

        Raises:
            CheckpointError: the state_dict has no step, or is not the inner optimizer's.
        """
        if self.KEY not in state_dict:
            raise CheckpointError(f"the optimizer state to load has no {self.KEY!r}: it was saved without a schedule.")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != self.KEY})
        self._step = int(state_dict[self.KEY]["step"])
        self._write()

    def _write(self) -> None:
        for group, base in zip(self.param_groups, self._base, strict=True):
            group["lr"] = learning_rate_at(self._step, base, self._stages)
