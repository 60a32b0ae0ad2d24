"""The learning rates of a run over its steps, and the clipping of its dense gradients.

A schedule is a function of the number of steps done, so a resumed run needs nothing but its step.
"""

from __future__ import annotations

from typing import Any

import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.spec.schedule import learning_rate_at, stages_of
from rayrec.train.config import TrainSpec


class LearningRates:
    """Writes learning rates before each step, where a schedule moves them.

    Args:
        spec: spec of the run, with the schedules.
        model: sharded model; the learning rates of its tables are written.
        dense: optimizer of the other parameters, or None.
    """

    def __init__(
        self, spec: TrainSpec, model: DistributedModelParallel, dense: torch.optim.Optimizer | None
    ) -> None:
        self._spec, self._model, self._dense = spec, model, dense
        self._sparse_stages = stages_of(spec.sparse_schedule, spec.steps)
        self._dense_stages = stages_of(spec.dense_schedule, spec.steps)
        self._tables = model.fused_optimizer if self._sparse_stages else None
        self._plan = model.plan
        self._base = [] if self._tables is None else self._tables.own_rates()
        self._dense_base = [float(group["lr"]) for group in dense.param_groups] if dense else []
        self._factors = {"sparse": 1.0, "dense": 1.0}

    def before(self, step: int) -> None:
        """Write the rates of the step that follows `step` finished ones."""
        if self._tables is not None:
            factor = learning_rate_at(step, 1.0, self._sparse_stages)
            is_new = self._model.plan is not self._plan
            if is_new:
                # a table has grown, whose kernel is another one
                self._tables, self._plan = self._model.fused_optimizer, self._model.plan
                self._base = self._tables.own_rates()
            if is_new or factor != self._factors["sparse"]:
                self._factors["sparse"] = factor
                for group, base in zip(self._tables.param_groups, self._base, strict=True):
                    group["lr"] = base * factor
        if self._dense is not None and self._dense_stages:
            factor = learning_rate_at(step, 1.0, self._dense_stages)
            if factor != self._factors["dense"]:
                self._factors["dense"] = factor
                for group, base in zip(self._dense.param_groups, self._dense_base, strict=True):
                    group["lr"] = base * factor

    def now(self) -> dict[str, float]:
        """Return the rates of the last step: "sparse", of tables without an optimizer of their own,
        and "dense".
        """
        rates = {"sparse": self._spec.tables_optimizer.lr * self._factors["sparse"]}
        if self._dense is not None:
            rates["dense"] = self._spec.dense_optimizer.lr * self._factors["dense"]
        return rates


def clip_dense(spec: TrainSpec, dense: torch.optim.Optimizer | None) -> None:
    """Let an optimizer clip the gradients of its parameters before each of its steps.

    The ranks have averaged the gradients by then, so all of them clip alike.
    """
    if dense is None or (spec.clip_norm is None and spec.clip_value is None):
        return
    parameters = [p for group in dense.param_groups for p in group["params"]]

    def clip(*_: Any) -> None:
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, spec.clip_norm)
        if spec.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, spec.clip_value)

    dense.register_step_pre_hook(clip)
