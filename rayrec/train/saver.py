"""`Saver`: writes a rank's checkpoints, whole or as increments, at once or asynchronously.

Where a thread writes, training pauses for a copy of what is to be saved. An increment holds rows
that were touched since the checkpoint before. The first checkpoint of a run is whole, and so is
every `full_every`-th, one after a save that failed, and one under another plan. All ranks decide
alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rayrec.checkpoint import (
    Parent,
    ShardState,
    TouchedState,
    copy_touched,
    copy_whole,
    save_checkpoint,
    watch_save,
)
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import ShardingPlan
from rayrec.train.checkpoint_config import FULL_EVERY, CheckpointConfig
from rayrec.train.save_thread import SaveThread

Shards = Sequence[ShardState | TouchedState]


class Saver:
    """Saves one rank's part of checkpoints; all ranks call the same methods together.

    Args:
        model: its shards are saved; with increments it tracks touched rows.
        writers: number of ranks that hold every table together; the others watch.
        keeps: the run has a folder; without one no save is asynchronous.
    Attributes:
        thread: writes the checkpoints of the run.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        model: DistributedModelParallel,
        rank: int,
        writers: int,
        keeps: bool,
    ) -> None:
        self._config, self._model = config, model
        self._rank, self._writers = rank, writers
        self.thread = SaveThread(behind=config.asynchronous and keeps)
        self._at_once = SaveThread(behind=False)
        # the checkpoint that the next one may add to, its plan, and after how many calls of
        # `rebase` it began
        self._last: tuple[Parent | None, ShardingPlan, int] = (None, model.plan, 0)
        self._saves, self._mark, self._bases = 0, 0, 0

    def save(
        self,
        where: str,
        content: Mapping[str, Any],
        then: Callable[[], None],
        *,
        apart: bool = False,
    ) -> None:
        """Write a checkpoint, or start to write it asynchronously.

        Args:
            where: folder of the checkpoint.
            content: further arguments of `save_checkpoint`.
            then: called once the checkpoint is complete, in the thread that wrote it.
            apart: it lies outside of the run's folder: whole, written at once, no increment's
                parent.
        Raises:
            SaveError: on every rank, when the storage refused on any of them; for an
                asynchronous save `finish` raises it.
        """
        thread = self._at_once if apart else self.thread
        increment = not apart and self._next_is_increment()
        shards = self._shards(increment, copied=thread.behind, apart=apart)
        parent = self._parent if increment else None
        plan, bases = self._model.plan, self._bases
        if not apart:
            self._last = (None, plan, bases)  # until this one is complete
        given = copied(content) if thread.behind else dict(content)

        def write() -> None:
            if self._rank >= self._writers:
                watch_save(where, thread.gather)
                # its name matters only to those that write; that it is set, to all
                saved: Parent | None = Parent("", "")
            else:
                manifest = save_checkpoint(
                    where,
                    shards=shards,
                    rank=self._rank,
                    world_size=self._writers,
                    gather=lambda value: thread.gather(value)[: self._writers],
                    parent=parent,
                    given_up=thread.given_up,
                    **given,
                )
                saved = Parent(where.rstrip("/").rpartition("/")[2], manifest.sha256())
            if not apart:
                self._last = (saved, plan, bases)
            then()

        thread.start(write)

    def rebase(self) -> None:
        """Make the next checkpoint a whole one, and one that is being written no parent."""
        self._bases += 1

    @property
    def _parent(self) -> Parent | None:
        parent, plan, bases = self._last
        # a chain cuts its tables alike, and the user's own loop may change the plan
        is_same = bases == self._bases and plan == self._model.plan
        return parent if is_same else None

    def _next_is_increment(self) -> bool:
        """Count the next checkpoint, and return True if it is an increment."""
        number, self._saves = self._saves, self._saves + 1
        if self._parent is None:
            # the count begins anew with a whole one
            number, self._saves = 0, 1
        whole_every = self._config.full_every or FULL_EVERY
        return self._config.incremental and number % whole_every != 0

    def _shards(self, increment: bool, *, copied: bool, apart: bool) -> Shards:
        """Return the shards or touched rows to write, and mark where the next increment begins."""
        touched, since = self._model.touched, self._mark
        if touched is not None and not apart:
            self._mark = touched.mark()
        if self._rank >= self._writers:
            return []
        states = self._model.shard_states()
        if not increment:
            return [copy_whole(state) for state in states] if copied else states
        assert touched is not None, "increments are asked for"
        rows = touched.since(since)
        return [copy_touched(state, rows[state.shard]) for state in states]


def copied(value: Any) -> Any:
    """Copy nested dicts and lists, with every tensor in memory of its own on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update({key: copied(part) for key, part in value.items()})
        return twin
    if type(value) in (list, tuple):
        return type(value)(copied(part) for part in value)
    return value
