"""What a sharded model answers beside its forward: the names of the user's module, and what its
engine knows of shards, optimizers and ids ahead.

Names of parameters, buffers and state_dicts are those of the inner module, so that checkpoints of
dense parameters and optimizers of the unsharded model fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rayrec.checkpoint import ShardState
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.state import fused_optimizer_of
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.rows import DynamicRows
from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig
from rayrec.observe.timer import StepTimer
from rayrec.optim import FusedOptimizer, SparseOptimizer
from rayrec.shards.touched import TouchedRows
from rayrec.shards.undo import RankUndo
from rayrec.sparse import KeyedJaggedTensor


class EngineFront(nn.Module):
    """Holds `module`, whose names have no prefix here and whose collections one engine runs."""

    _engine: ShardedEmbeddings
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

    def shard_states(self) -> list[ShardState]:
        """Return live rows and optimizer state of this rank's shards, which checkpoints hold."""
        return self._engine.shard_states()

    @property
    def touched(self) -> TouchedRows | None:
        """Rows that training has touched; None unless the model was made with track_rows=True.

        Every optimizer of rayrec changes only rows that were looked up, weight decay included.
        Resharding, growth, and loading a state_dict, count as touching all rows.
        """
        return self._engine.touched

    @property
    def undo(self) -> RankUndo | None:
        """Setter of sync points, which also goes back to them; None unless the model has memory.

        After `reshard` no sync point can be set any more.
        """
        return self._engine.undo

    def prefetch(self, kjt: KeyedJaggedTensor) -> bool:
        """Start the input exchange of a KJT that a later forward will be given.

        All ranks must do so in the same order.

        Returns:
            Whether it was started; a first forward with the same keys teaches the model who reads
            them.
        Raises:
            ConfigError: the model was built without prefetch=True, or was closed.
        """
        return self._engine.prefetch(kjt)

    def forget_prefetched(self) -> None:
        """Expect no forward of what was prefetched until now."""
        self._engine.forget_prefetched()

    def close(self, wait: bool = True) -> None:
        """End the thread that prefetches; the model still works, without `prefetch`.

        It comes before the process groups are left. A second call does nothing.

        Args:
            wait: wait for exchanges under way; False after a failure, when other ranks may be gone.
        """
        self._engine.close(wait)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The tables' optimizers as a torch optimizer; make it anew after `reshard` and `grow`.

        Learning-rate schedules drive it. Its state is this rank's, keyed by the parameter names of
        the unsharded module.
        """
        return fused_optimizer_of(self.module, self._engine)

    @property
    def sparse_optimizers(self) -> Mapping[str, SparseOptimizer]:
        """The optimizer of every table."""
        return self._engine.optimizers

    @property
    def iteration(self) -> int:
        """Table updates so far, by which an optimizer corrects its bias; checkpoints carry it."""
        return self._engine.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._engine.iteration = value

    def dynamic_rows(self) -> list[DynamicRows]:
        """Return the ids of this rank's shards of dynamic tables."""
        return list(self._engine.deployed.dynamic_rows().values())

    @property
    def tables(self) -> tuple[BaseEmbeddingConfig, ...]:
        """All tables of the model, with the rows that they have now."""
        return self._engine.deployed.world.tables

    def grow(self, tables: Iterable[str] | None = None) -> dict[str, int]:
        """Double the rows of dynamic tables most of whose rows are in use, between two steps; see
        `GrowthConfig`. Every rank must call it.

        Ids keep their rows, with the state of their optimizer. The loop of a run calls it.

        Args:
            tables: names of the tables to look at; None takes all.
        Returns:
            the rows of each table that has grown.
        """
        return self._engine.grow(tables)

    def take_rows(self, rows: Mapping[str, int]) -> None:
        """Give dynamic tables other numbers of rows; every rank must call it.

        It is for who restores what was saved with so many.
        """
        plan = self._engine.plan
        other = {name: wanted for name, wanted in rows.items() if wanted != plan.rows[name]}
        if other:
            self._engine.reshard(plan.with_rows(other), other)

    @property
    def id_clocks(self) -> dict[str, Instant]:
        """Training steps of each dynamic table so far, and the time of its data, by which its ids
        grow old; checkpoints carry them.
        """
        return self._engine.id_clocks

    @id_clocks.setter
    def id_clocks(self, instants: Mapping[str, Instant]) -> None:
        self._engine.id_clocks = instants

    @property
    def timer(self) -> StepTimer | None:
        """Clock of the parts of a step on this rank, or None; set one to count later steps."""
        return self._engine.runner.timer

    @timer.setter
    def timer(self, timer: StepTimer | None) -> None:
        self._engine.runner.timer = timer

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the tables' updates to come."""
        self._engine.set_learning_rate(lr)
