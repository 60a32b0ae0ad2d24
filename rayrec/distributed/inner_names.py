"""A module that answers for another one under that one's own names.

Names of parameters, buffers and state_dicts are those of the inner module, so that checkpoints of
dense parameters and optimizers of the unsharded model fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rayrec.errors import ConfigError


class NamedAsInner(nn.Module):
    """Holds `module`, whose names have no prefix here."""

    module: nn.Module

    def dense_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that an outer optimizer must update: all but the tables."""
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the user's module without the tables."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the user's module."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Names as in the unsharded module; tables spread over ranks are `ShardedTensor`s."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        prefix: str = "",
    ) -> Any:
        """Load an unsharded module's state_dict, or one of the same plan.

        Every rank takes its own rectangles.

        Args:
            strict: names must match.
            prefix: before all names of this model, as `state_dict(prefix=)` writes them.
        Returns:
            missing_keys and unexpected_keys, by their names in `state_dict`.
        Raises:
            ConfigError: `assign`, which tables do not support; or a prefix given by position.
            RuntimeError: names and shapes do not match, as in torch.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) is not supported: the rows live in the lookup "
                "kernels."
            )
        if isinstance(strict, str):
            raise ConfigError(
                f"load_state_dict(state_dict, {strict!r}): the second argument is `strict`; name "
                f"it, prefix={strict!r}."
            )
        if not prefix:
            return self.module.load_state_dict(state_dict, strict)
        mine = [key for key in state_dict if key.startswith(prefix)]
        own = {key.removeprefix(prefix): state_dict[key] for key in mine}
        missing, unexpected = result = self.module.load_state_dict(own, strict)
        return type(result)([prefix + key for key in missing], [prefix + key for key in unexpected])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The state_dict has the names of the inner module, which is called "module" in this one.
        # torch looks for its names with that word, so each key of this module gets it, in place.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
