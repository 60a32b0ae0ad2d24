"""Learning-rate schedules with warm-up: stages that follow each other on one axis of steps.

The learning rate of a step is the base learning rate times the factor of the stage that the step
lies in. Names, defaults and formulas are those of TorchRec's `WarmupOptimizer`: every formula
reads the absolute step i, `max_iters` is the last absolute step of a stage, and after the last
stage the factor is 1. The learning rate is written to the groups of a keyed optimizer, so one
schedule drives dense parameters and tables alike. `rayrec.spec.schedule` holds the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import CheckpointError, ConfigError
from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper
from rayrec.spec.schedule import WarmupStage, check_stages, learning_rate_at


class WarmupOptimizer(OptimizerWrapper):
    """An optimizer whose learning rate follows stages.

    Args:
        optimizer: its groups' learning rates are written, the first one at once.
        stages: stages of the schedule, one after another.
        lr: base learning rate of every group; None takes each group's own: that of the schedule
            that drove it before, which torch calls "initial_lr", or the rate that it has now.
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
        self._initial = f"initial_{lr_param}"
        self._base = [
            float(group.get(self._initial, group[lr_param])) if lr is None else lr
            for group in self.param_groups
        ]
        self._step = 0
        self._write()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, then move the learning rate on."""
        super().step(closure)
        self._step += 1
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict with the step."""
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
            group[self._initial] = base
            group[self._lr_param] = learning_rate_at(self._step, base, self._stages)
