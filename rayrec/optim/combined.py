"""Several keyed optimizers as one: a model's dense parameters and its tables step, save and load
together.

The parts keep their state; the whole reads it under the parts' prefixes and hands each part its own
when state is loaded.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rayrec.errors import CheckpointError, ConfigError
from rayrec.optim.keyed import KeyedOptimizer


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one.

    Args:
        optims: optimizers, or pairs of a prefix for their parameters' names and an optimizer.
    Raises:
        ConfigError: two of them have a parameter of one name.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [entry if isinstance(entry, tuple) else ("", entry) for entry in optims]
        params: dict[str, Tensor] = {}
        for prefix, optimizer in self._optims:
            for name, parameter in optimizer.params.items():
                key = self.prepend_opt_key(name, prefix)
                if key in params:
                    raise ConfigError(
                        f"two optimizers have a parameter {key!r}; give one a prefix: "
                        "CombinedOptimizer([('a', first), ...])."
                    )
                params[key] = parameter
        # a merged state for reading: each part writes its own
        state = ChainMap(*(optimizer.state for _, optimizer in self._optims))
        super().__init__(
            params,
            state,
            [group for _, optimizer in self._optims for group in optimizer.param_groups],
        )

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The parts with their prefixes."""
        return self._optims

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return the name of a parameter under a prefix."""
        return f"{opt_key}.{name}" if opt_key else name

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients."""
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every part."""
        for _, optimizer in self._optims:
            optimizer.step(closure=closure)

    def state_dict(self) -> dict[str, Any]:
        """Merge the parts' state_dicts, with names under the prefixes of the parts.

        What else a part holds is under "parts", by its position.
        """
        merged: dict[str, Any] = {"state": {}, "param_groups": [], "parts": {}}
        for i, (prefix, optimizer) in enumerate(self._optims):
            part = optimizer.state_dict()
            merged["parts"][i] = {
                key: value for key, value in part.items() if key not in ("state", "param_groups")
            }
            merged["state"] |= {
                self.prepend_opt_key(name, prefix): value for name, value in part["state"].items()
            }
            for group in part["param_groups"]:
                merged["param_groups"].append(
                    {
                        **group,
                        "params": [self.prepend_opt_key(name, prefix) for name in group["params"]],
                    }
                )
        return merged

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load into every part its own entries.

        Raises:
            CheckpointError: names, state or shapes are not those of the parts.
        """
        left = set(state_dict["state"]) - set(self.params)
        if left:
            raise CheckpointError(
                f"the optimizer state to load has parameter {sorted(left)[0]!r}, which is not "
                "optimized here."
            )
        for i, (prefix, optimizer) in enumerate(self._optims):
            names = {self.prepend_opt_key(name, prefix): name for name in optimizer.params}
            state = {
                names[key]: value for key, value in state_dict["state"].items() if key in names
            }
            groups = [
                {**group, "params": sorted(names[key] for key in group["params"])}
                for group in state_dict.get("param_groups", ())
                if group["params"] and set(group["params"]) <= set(names)
            ]
            optimizer.load_state_dict(
                {"state": state, "param_groups": groups, **state_dict.get("parts", {}).get(i, {})}
            )
