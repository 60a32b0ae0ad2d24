"""`SavingRank`: checkpoints and sync points of a rank, and its restart from them.

It goes on from a checkpoint, or from a sync point in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig
from rayrec.train import hand_over
from rayrec.train.callbacks import Hooks
from rayrec.train.data_cursor import DataCursor
from rayrec.train.evaluation_schedule import EvaluationSchedule
from rayrec.train.events import Began, Evaluation, Event, ProgressReport, Saved
from rayrec.train.every import Every
from rayrec.train.in_memory import InMemoryKeeper
from rayrec.train.publisher import Publisher
from rayrec.train.rank_scores import ScoringRank
from rayrec.train.shaping import Best
from rayrec.train.sync_points import RankPoints


class SavingRank(ScoringRank):
    """One rank's checkpoints and sync points; all ranks call the same methods together.

    Attributes:
        step: global steps done.
        rows, seconds: rows of training and its duration in this run, over all ranks.
        handed_over: the ranks keep their tables for the next world, and have not saved them.
    """

    step: int
    rows: int
    seconds: float
    tables: Sequence[BaseEmbeddingConfig]
    hooks: Hooks
    _tell: Callable[[Event], None]
    _on_phase: Callable[[str], None]
    _schedule: EvaluationSchedule
    _cursor: DataCursor
    _points: RankPoints | None
    _publishes: bool

    def __init__(self) -> None:
        self._kept: InMemoryKeeper | None = None
        self._publisher: Publisher | None = None
        self._saving: Saved | None = None
        self._since_save_s = 0.0
        # with how many ranks the driver wants to go on, where it asked this rank to stop for that
        self.going_to: Callable[[], int] = lambda: 0
        self.handed_over = False

    @property
    def best(self) -> Best:
        """Best evaluation of the run so far."""
        return self._schedule.best

    def _announce(self, event: ProgressReport | Evaluation | Saved) -> None:
        """Tell the run and this rank's callbacks of an event."""
        self._tell(event)
        self.hooks.event(event)

    def _keep(self, dense: torch.optim.Optimizer | None) -> None:
        """Make the keeper, which saves and restores the model and its dense optimizer."""
        self._kept = InMemoryKeeper(
            self.spec, self.model, self.tables, dense, self._cursor, self.rank, self.world_size
        )
        if self._publishes:
            self._publisher = Publisher(
                self.spec, self.model, self.tables, self.rank, self.world_size, self._on_phase
            )

    @property
    def _keeper(self) -> InMemoryKeeper:
        if self._kept is None:
            raise ConfigError(
                "the loop did not say what checkpoints hold: call context.track(optimizer) after "
                "context.shard(module)."
            )
        return self._kept

    @property
    def _save_every(self) -> Every:
        """Schedule of periodic checkpoints; never due without a run folder."""
        return self.spec.checkpoint.every if self.spec.run_path else Every()

    def save(self, path: str | None = None) -> str:
        """Write a checkpoint, by default into the run's folder under the number of the step.

        Returns:
            the path of the checkpoint.
        Raises:
            SaveError: on every rank, when any of them could not write.
        """
        self._on_phase("saving a checkpoint")
        started, best = time.perf_counter(), self.best
        self._finish_save()
        newest = self._keeper.newest
        where = self._keeper.save(self.step, path, best, (self.rows, self.seconds))
        self._on_phase("training")
        if path is None:
            self._since_save_s = 0.0
        if where != newest:
            is_best = self._schedule.keeps_best and best.step == self.step
            seconds = time.perf_counter() - started
            self._saving = Saved(step=self.step, path=where, seconds=seconds, best=is_best)
        if not self._keeper.saver.under_way:
            self._finish_save()
        return where

    @property
    def _written(self) -> bool:
        """True if this rank has written its part of an asynchronous checkpoint."""
        return self._kept is not None and self._kept.saver.done

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and announce it.

        Raises:
            SaveError: on every rank, when any of them could not write.
        """
        saving, self._saving = self._saving, None
        if self._kept is not None:
            self._kept.finish()
        if saving is not None:
            self._announce(saving)

    def _hand_over(self, may: bool) -> bool:
        """Keep the tables for the next world, if that was asked for and memory suffices.

        All ranks call it together, at a step where nothing is half done.

        Args:
            may: True if this rank allows it; the result is the same on all ranks.
        """
        states = [] if self._kept is None else self.model.shard_states()
        wanted = self.going_to() if may else None
        ranks = hand_over.next_ranks(wanted, states, self.spec.sharding_group_size)
        if self._kept is None or not ranks:
            return False
        self._finish_save()
        hand_over.keep(self._keeper.hold(self.step, self.best, (self.rows, self.seconds)))
        return True

    def _leave_save(self) -> None:
        """Abandon a checkpoint or publication under way, since this rank leaves its world."""
        if self._kept is not None:
            self._kept.saver.give_up()
        if self._publisher is not None:
            self._publisher.give_up()

    def _sync(self) -> None:
        """Set a sync point at this step."""
        if self._points is not None and self.model.undo is not None:
            small = self._keeper.remember(self.step, self.best, (self.rows, self.seconds))
            self.model.undo.sync(self._points.at(self.step), small)

    def begin(self, note: Callable[[str], None] = lambda line: None) -> Began:
        """Start anew, from another run's weights, from a checkpoint, from a sync point, or with the
        tables of the ranks before.

        See `Keeper.begin`, `open_points` and `hand_over`.
        """
        if self._publisher is not None:
            self._publisher.rebase()
        point = None if self._points is None else self._points.chosen
        if self.spec.handed_over:
            self._on_phase("taking the tables over")
            self.step = self._keeper.take_over(hand_over.take(), note)
        elif point is not None and self.model.undo is not None:
            self._on_phase("undoing steps")
            self.step = self._keeper.recall(self.model.undo.go_back(point), note)
        else:
            self.step = self._keeper.begin(note)
        self.rows, self.seconds = self._keeper.trained
        self._schedule.resume(self._keeper.best)
        if point is None:
            self._sync()
        path, in_memory = self._keeper.begun_from, point is not None or self.spec.handed_over
        return Began(step=self.step, path=path, in_memory=in_memory)

    def restore(self, path: str, *, weights_only: bool = False) -> None:
        """Resume a checkpoint of any number of ranks and any plan, by `Keeper.restore`."""
        self._finish_save()
        if self.model.undo is not None:
            self.model.undo.forget()
        if self._publisher is not None:
            self._publisher.rebase()
        self.step = self._keeper.restore(path, weights_only=weights_only)
        self._schedule.resume(self._keeper.best)

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint of the run, or None."""
        return self._kept.newest if self._kept is not None else None
