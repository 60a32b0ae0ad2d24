"""`Checkpoints`: decides when a rank's run saves, and saves.

This is the one place that answers "save now?": when the schedule says so, when the driver asks,
when an evaluation was the best, and at the end. `Saver` writes the files, behind the training where
the run wants that; a checkpoint counts as the newest once all ranks have written it.
All ranks call the same methods together.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from rayrec.checkpoint import CheckpointManager
from rayrec.dynamic.clock import clock_extras
from rayrec.errors import ConfigError
from rayrec.streams import StreamDataset
from rayrec.train.events import Evaluation, Saved
from rayrec.train.every import Every
from rayrec.train.run_state import LiveRun, RunState
from rayrec.train.saver import Saver
from rayrec.train.shaping import Best
from rayrec.train.window import WindowSum


class Checkpoints:
    """Checkpoints of one rank of a run.

    Attributes:
        newest: path of the newest checkpoint of the run, or None; it is not written again. Those
            that `save` was given a path for count where the run has no folder.
        ending: no step follows.
    """

    def __init__(self, live: LiveRun) -> None:
        spec = live.spec
        self._live, self._config = live, spec.checkpoint
        self._keeps = bool(spec.run_path)
        self._every = self._config.every if self._keeps else Every()
        self._saver = Saver(self._config, live.model, live.rank, live.writers, self._keeps)
        self._saving: Saved | None = None
        # path and step of the last that lies outside of the run's folder
        self._apart: tuple[str, int] | None = None
        self._since_s, self.ending = 0.0, False
        self.newest: str | None = None

    def next_step(self, step: int) -> int | None:
        """Return the next step at which a checkpoint is due; None where seconds decide."""
        batch = self._live.spec.global_batch_size
        return self._every.next_step(step, self._live.rows, batch)

    @property
    def written(self) -> bool:
        """True if this rank has written its part of an asynchronous checkpoint."""
        return self._saver.thread.done

    def before_evaluation(self, merged: WindowSum) -> None:
        """Save at the end of a window if the driver asked for it; announce what was written."""
        if merged.written:
            self.finish()
        # a node will go, and an evaluation may take its time
        if merged.save and self._keeps:
            self.save()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        """Save if the evaluation is the best so far and the run keeps the best."""
        if evaluation.best and self._live.schedule.keeps_best and self._keeps:
            self.save()

    def after_window(self, merged: WindowSum) -> None:
        """Save if a periodic checkpoint is due."""
        self._since_s += merged.passed_s
        live = self._live
        if self._every.due(live.step, self._since_s, live.rows, merged.rows, live.newest_events):
            self.save()

    def after_wait(self, seconds: float) -> None:
        """Save if a checkpoint is due by time while no step is taken."""
        self._since_s += seconds
        if self._live.step and self._every.s is not None and self._every.due(0, self._since_s):
            self.save()

    def at_end(self, *, handed_over: bool) -> None:
        """Save at the end of the run, unless the next world takes the tables over."""
        if self._keeps and self._config.at_end and self._live.step and not handed_over:
            self.save()

    def save(self, path: str | None = None) -> str:
        """Write a checkpoint, by default into the run's folder under the number of the step.

        Returns:
            the path of the checkpoint; one that was written or restored there before is kept.
        Raises:
            ConfigError: the run has no folder, and there is no path.
            SaveError: on every rank, when any of them could not write.
        """
        live, started = self._live, time.perf_counter()
        live.on_phase("saving a checkpoint")
        self.finish()
        manager = None
        if path is None and live.spec.run_path:
            manager = CheckpointManager(live.spec.run_path)
        where = manager.path(live.step) if manager else path
        if not where:
            raise ConfigError("the run has no storage path; pass save(path) one.")
        best = live.schedule.best
        if where != self.newest and (where, live.step) != self._apart:
            live.model.sync()  # replicas have drifted apart, and one of each is saved

            def prune() -> None:
                if manager and live.rank == 0 and self._config.num_to_keep:
                    kept = () if best.step is None else (best.step,)
                    manager.prune(self._config.num_to_keep, keep=kept)

            self._saver.save(where, self._content(live.state()), prune, apart=manager is None)
            is_best = live.schedule.keeps_best and best.step == live.step
            seconds = time.perf_counter() - started
            self._saving = Saved(step=live.step, path=where, seconds=seconds, best=is_best)
        live.on_phase("training")
        if path is None:
            self._since_s = 0.0
        if not self._saver.thread.busy:
            self.finish()
        return where

    def rebase(self) -> None:
        """Make the next checkpoint a whole one, since rows have changed outside of training."""
        self._saver.rebase()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and announce it.

        Raises:
            SaveError: on every rank, when any of them could not write.
        """
        saving, self._saving = self._saving, None
        thread = self._saver.thread
        if saving is not None and thread.busy and not thread.done:
            line = f"waiting for {saving.path}, which is still being written"
            if not self.ending:
                line += ": the storage is slower than checkpoints are frequent"
            self._live.note(line)
        thread.finish()
        if saving is not None:
            spec = self._live.spec
            if spec.run_path and CheckpointManager(spec.run_path).step_of(saving.path) is None:
                self._apart = saving.path, saving.step
            else:
                self.newest = saving.path
            self._live.announce(saving)

    def give_up(self) -> None:
        """Abandon a checkpoint under way, since this rank leaves its world."""
        self._saver.thread.give_up()

    def _content(self, state: RunState) -> dict[str, Any]:
        """Return the arguments of `save_checkpoint`: all of a checkpoint but the rows."""
        live, spec = self._live, self._live.spec
        optimizers = {}
        for name, optimizer in live.model.sparse_optimizers.items():
            optimizers[name] = {"name": optimizer.name, **optimizer.hyperparameters}
        extras = {
            "dense_optimizer": spec.dense_optimizer.name,
            "table_updates": state.updates,
            **clock_extras(state.id_clocks),
            "trained": {"rows": state.rows, "seconds": state.seconds},
            **({} if state.best == Best() else {"best": asdict(state.best)}),
            **(spec.data.extras() if isinstance(spec.data, StreamDataset) else {}),
            **spec.extras,
        }
        return {
            **({} if spec.mark is None else {"check": spec.mark.check}),
            "tables": live.model.tables,
            "plan": live.model.plan,
            "dense": state.dense,
            "dense_optimizer": state.dense_optimizer,
            "step": state.step,
            "cursor": live.cursor.state(),
            "optimizers": optimizers,
            "extras": extras,
            "random": [state.random[rank] for rank in range(state.world_size)],
        }
