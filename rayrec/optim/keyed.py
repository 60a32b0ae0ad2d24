"""Optimizers whose state is keyed by parameter name instead of by position.

`KeyedOptimizer` has TorchRec's names and form of state_dict: {"state": {parameter name: state},
"param_groups": [...]}. So a state_dict outlives a change of order, and the parts of a model (dense
parameters, tables) merge into one (`rayrec.optim.combined`). All of them are torch optimizers:
learning-rate schedulers, step hooks and GradScaler take them. Copies and pickles are whole; as
torch's, they come without hooks and schedulers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import CheckpointError, ConfigError


class KeyedOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer over named parameters.

    Args:
        params: name -> parameter.
        state: parameter -> its state by name; shared, not copied.
        param_groups: torch's groups, each with "params" and its options; shared, not copied.
    Raises:
        ConfigError: a group or the state holds a parameter that has no name.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: MutableMapping[Any, Any],
        param_groups: list[dict[str, Any]],
    ) -> None:
        # torch's constructor refuses to have no parameters, as a rank without shards has; this sets
        # up the hooks alike
        self.__setstate__({"defaults": {}, "state": state, "param_groups": param_groups})
        self.params = dict(params)
        names = {id(p) for p in self.params.values()}
        for group in param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in a param_group and "
                        "has no name in params."
                    )
        for parameter in state:
            if id(parameter) not in names:
                what = (
                    f"a parameter of shape {tuple(parameter.shape)}"
                    if isinstance(parameter, Tensor)
                    else repr(parameter)
                )
                raise ConfigError(f"the state is keyed by {what}, which has no name in params.")

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps groups and state alone; hooks and a scheduler's `step` belong to this object
        return {
            name: value
            for name, value in self.__dict__.items()
            if not name.endswith("_hooks") and name not in ("step", "_opt_called")
        }

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.params.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return state and options by parameter name; tensors are live, not copies."""
        names = self._names()
        groups = []
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({"params": sorted(names[id(p)] for p in group["params"]), **options})
        return {
            "state": {names[id(p)]: dict(state) for p, state in self.state.items()},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state, by copying into the tensors that are there, and options of equal groups.

        Raises:
            CheckpointError: names, state or shapes are not those of this optimizer.
        """
        names = self._names()
        own = {names[id(p)]: state for p, state in self.state.items()}
        saved = state_dict["state"]
        # the other way round is fine: torch's optimizers make state at the first step
        missing = sorted(name for name, state in own.items() if state and name not in saved)
        if missing:
            raise CheckpointError(
                f"the optimizer state to load lacks {len(missing)} parameters, for example "
                f"{missing[0]!r}."
            )
        unknown = sorted(set(saved) - set(self.params))
        if unknown:
            raise CheckpointError(
                f"the optimizer state to load has parameter {unknown[0]!r}, which is not optimized "
                "here."
            )
        for name, values in saved.items():
            self._load_parameter(name, self.state[self.params[name]], values)
        own_groups = {
            tuple(sorted(names[id(p)] for p in group["params"])): group
            for group in self.param_groups
        }
        for saved_group in state_dict.get("param_groups", ()):
            group = own_groups.get(tuple(saved_group["params"]))
            if group is None:
                raise CheckpointError(
                    "no group of this optimizer has just the parameters "
                    f"{saved_group['params'][:5]}; group them alike."
                )
            for key, value in saved_group.items():
                if key != "params":
                    group[key] = value
        self.post_load_state_dict()

    def _load_parameter(
        self, name: str, own: MutableMapping[str, Any], saved: Mapping[str, Any]
    ) -> None:
        # Names are compared first, so that the state of another optimizer changes nothing.
        known = set(own) or self._state_keys(name)
        if known and known != set(saved):
            raise CheckpointError(
                f"the state of {name!r} holds {sorted(saved)}, this optimizer's {sorted(known)}; "
                "it is another optimizer's."
            )
        for key, value in saved.items():
            mine = own.get(key)
            if isinstance(mine, Tensor) and isinstance(value, Tensor):
                if mine.shape != value.shape:
                    raise CheckpointError(
                        f"state {key!r} of {name!r} has shape {tuple(value.shape)}, here it is "
                        f"{tuple(mine.shape)}."
                    )
                mine.detach().copy_(value)
            else:
                own[key] = value.detach().clone() if isinstance(value, Tensor) else value

    def _state_keys(self, name: str) -> set[str]:
        """Return the names of the state that a parameter will have; nothing if they are unknown."""
        return set()

    def post_load_state_dict(self) -> None:
        """Called at the end of `load_state_dict`."""

    @abstractmethod
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""

    def add_param_group(self, param_group: Any) -> None:
        """Not supported: parameters need names.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a keyed optimizer takes no more groups: build another one and join them with "
            "CombinedOptimizer."
        )


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A torch optimizer over named parameters.

    Args:
        params: name -> parameter.
        optim_factory: makes the torch optimizer of a list of parameters or of groups.

    Example:
        KeyedOptimizerWrapper(dict(model.dense_parameters()), lambda params:
            torch.optim.Adam(params, lr=1e-3))
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self._optimizer = optim_factory(list(params.values()))
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)
        self.defaults = self._optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        self._optimizer.step(closure=closure)

    def _state_keys(self, name: str) -> set[str]:
        """Find out by a step of the same optimizer on a parameter of one element.

        torch makes a parameter's state in its first step, so no other place tells its names.
        """
        parameter = self.params[name]
        probe = torch.zeros(
            [1] * parameter.dim(),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=True,
        )
        probe.grad = torch.zeros_like(probe)
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        trial = object.__new__(type(self._optimizer))
        wrapped: Any = self._optimizer
        trial.__dict__.update(KeyedOptimizer.__getstate__(wrapped))
        try:
            trial.__setstate__(
                {"state": defaultdict(dict), "param_groups": [{**group, "params": [probe]}]}
            )
            trial.step()
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
            return set()  # an optimizer that wants a closure, or more than a step
        return set(trial.state[probe])


class OptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer around another one, which it shares parameters, state and groups with; for
    subclasses.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__(optimizer.params, optimizer.state, optimizer.param_groups)
        self.defaults = optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        self._optimizer.step(closure=closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state_dict into the inner optimizer."""
        self._optimizer.load_state_dict(state_dict)
