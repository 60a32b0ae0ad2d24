"""Interface of a sharded model to its engine: shards, optimizers, ids ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayrec.checkpoint import ShardState
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.inner_names import NamedAsInner
from rayrec.distributed.state import fused_optimizer_of
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.rows import DynamicRows
from rayrec.layout import BaseEmbeddingConfig
from rayrec.observe.timer import StepTimer
from rayrec.optim import FusedOptimizer, SparseOptimizer
from rayrec.shards.touched import TouchedRows
from rayrec.shards.undo import RankUndo
from rayrec.sparse import KeyedJaggedTensor


class EngineFront(NamedAsInner):
    """A module whose collections one engine runs."""

    _engine: ShardedEmbeddings

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
