"""`RankRun`: what a rank's training has beside its steps, whoever writes the loop around them.

It knows the place in the data, saves and restores, evaluates on the way, merges windows and tells
of them. `RankTrainer` is the ready-made loop on top of it, and `LoopContext` serves a loop of the
user's own. All ranks call the same methods together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.errors import ConfigError, InputError
from rayrec.train.callbacks import Hooks
from rayrec.train.config import TrainSpec
from rayrec.train.keeper import Keeper
from rayrec.train.on_the_way import OnTheWay
from rayrec.train.place import Place
from rayrec.train.progress import Began, Evaluation, Event, ProgressReport, Saved
from rayrec.train.publisher import Publisher
from rayrec.train.rank_scores import ScoringRank
from rayrec.train.scoring import first_of
from rayrec.train.shaping import Best
from rayrec.train.sync_points import open_points
from rayrec.train.table_optimizers import optimizers_of
from rayrec.train.window import WindowSum, next_length


class RankRun(ScoringRank):
    """One rank of a run.

    Args:
        spec: the run.
        device: of this rank.
        on_phase: gets what the rank is doing, in words that complete "while ...".
    Attributes:
        model: the sharded model.
        step: global steps done.
        rows, seconds: trained on and taken by this run, over all ranks.
        loss: mean over the rows of the last window.
        hooks: the callbacks of this rank.
        save_asked: whether this rank was asked to save at the end of its window; see `RankContext`.
    """

    def __init__(
        self, spec: TrainSpec, device: torch.device | str, on_phase: Callable[[str], None]
    ) -> None:
        self.spec, self.device, self._on_phase = spec, torch.device(device), on_phase
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.step, self.rows, self.seconds = 0, 0, 0.0
        self.loss: float | None = None
        self.hooks = Hooks(spec.rank_callbacks, f"rank {self.rank}", self)
        self._on_the_way = OnTheWay(spec)
        self._tell: Callable[[Event], None] = lambda event: None
        self._place = Place(spec, self.rank, self.world_size, pin_memory=self.device.type == "cuda")
        self._window_steps = 1
        self._saving: Saved | None = None
        self._since_save_s = 0.0
        self._kept: Keeper | None = None
        self._points = open_points(spec.sync_points, self.rank, self.device)
        # a run that scores alone does not publish
        self._publishes = spec.publish is not None and spec.data is not None
        self._publisher: Publisher | None = None
        # whether the driver asked for a save, of this rank
        self.save_asked: Callable[[], bool] = lambda: False

    def shard(self, module: torch.nn.Module, **options: Any) -> DistributedModelParallel:
        """Shard the tables of a module by the run's plan, with the run's optimizers and options.

        Args:
            module: its tables may lie on the meta device.
            options: further arguments of `DistributedModelParallel`.
        Raises:
            ConfigError: the module holds nothing to shard.
            PlanError: the plan is not for these tables or this many ranks.
        """
        spec = self.spec
        self.tables = table_configs(module)
        chosen = {
            "qcomms": spec.qcomms,
            "share_tables": spec.share_tables,
            "sharding_group_size": spec.sharding_group_size,
            "sync_every": spec.sync_every,
            "track_rows": self._publishes or (spec.checkpoint.incremental and bool(spec.run_path)),
        }
        if self._points is not None:
            chosen |= self._points.options()
        self.model = DistributedModelParallel(
            module,
            plan=spec.plan,
            sparse_optimizer=optimizers_of(spec, self.tables),
            device=self.device,
            seed=spec.seed,
            **{**chosen, **options},
        )
        return self.model

    def _keep(self, dense: torch.optim.Optimizer | None) -> None:
        """Make what saves and restores the model with the optimizer of its dense parameters."""
        self._kept = Keeper(
            self.spec, self.model, self.tables, dense, self._place, self.rank, self.world_size
        )
        if self._publishes:
            self._publisher = Publisher(
                self.spec, self.model, self.tables, self.rank, self.world_size, self._on_phase
            )

    @property
    def _keeper(self) -> Keeper:
        if self._kept is None:
            raise ConfigError(
                "the loop did not say what checkpoints hold: call context.track(optimizer) after "
                "context.shard(module)."
            )
        return self._kept

    @property
    def early(self) -> str:
        """Why early stopping ended the run, or ""."""
        return self._on_the_way.early

    @property
    def best(self) -> Best:
        """The best evaluation of the run so far."""
        return self._on_the_way.best

    def _after_window(self, merged: WindowSum, should_stop: Callable[[], bool]) -> bool:
        """Evaluate and save where that is due at this step; whether the run was stopped.

        Windows end where an evaluation or a save is due, so none is missed.
        """
        stopped = merged.stop
        if merged.written:
            self._finish_save()
        # a node will go: not after an evaluation, which may take its time
        if merged.save and self.spec.run_path:
            self.save()
        if self._on_the_way.due(self.step, merged.seconds) and not stopped:
            stopped = not self._evaluate(should_stop)
        self._since_save_s += merged.seconds
        if self._save_due():
            self.save()
        if self._points is not None and self._points.due(self.step):
            self._sync()
        if self._publisher is not None:
            self._publisher.after_window(self.step, merged.seconds)
        return stopped

    def _sync(self) -> None:
        """Set a sync point at this step."""
        if self._points is not None and self.model.undo is not None:
            small = self._keeper.remember(self.step, self.best, (self.rows, self.seconds))
            self.model.undo.sync(self._points.at(self.step), small)

    def _save_due(self) -> bool:
        """Whether a checkpoint on the way is due at the end of a window."""
        every_s = self.spec.checkpoint.every_s if self.spec.run_path else None
        if every_s is not None:
            return self._since_save_s >= every_s
        return bool(self._save_every) and self.step % (self._save_every or 1) == 0

    def _make_up(self, should_stop: Callable[[], bool]) -> bool:
        """Evaluate what a run that was stopped at this very step did not; False when stopped."""
        return not self._on_the_way.missed(self.step) or self._evaluate(should_stop)

    def _end_run(self) -> None:
        """Save what the run keeps, and raise what a callback of this rank is to blame for."""
        if self._kept is not None:
            self._kept.ending = True
        if self.spec.run_path and self.spec.checkpoint.at_end and self.step:
            self.save()
        if self._publisher is not None:
            self._publisher.at_end(self.step)
        self._finish_save()
        if self.hooks.error is not None:
            raise self.hooks.error

    def _next_end(self) -> int:
        """The last step of the next window at the latest, by what is due then."""
        ends = [self.spec.steps, self._on_the_way.next_step(self.step)]
        if self._save_every:
            ends.append((self.step // self._save_every + 1) * self._save_every)
        if self._points is not None:
            ends.append(self._points.next_step(self.step))
        if self._publisher is not None:
            ends.append(self._publisher.next_step(self.step))
        return min(end for end in ends if end is not None)

    def _report_end(self) -> int:
        """The step at which the next report is due.

        A window that ends early because of a stop is saved, and no checkpoint holds half-summed
        gradients, so windows end at multiples of `accumulate`.
        """
        group = self.spec.accumulate
        return -(-(self.step + self._window_steps) // group) * group

    def _evaluate(self, should_stop: Callable[[], bool]) -> bool:
        """Score the evaluation data on the way; False when it was stopped amid them."""
        assert self.spec.eval_data is not None
        self._on_phase("evaluating")
        started = time.perf_counter()
        scores = self.evaluate(self.spec.eval_data, None, should_stop, sample=self._on_the_way.rows)
        self._on_phase("training")
        if scores is None:
            return False
        evaluation = self._on_the_way.judge(self.step, scores, time.perf_counter() - started)
        self._announce(evaluation)
        if evaluation.best and self._on_the_way.keeps_best and self.spec.run_path:
            self.save()
        return True

    def final_scores(
        self, should_stop: Callable[[], bool], on_batch: Callable[[], None]
    ) -> dict[str, float] | None:
        """Scores of all evaluation data after training; None when the evaluation was stopped."""
        assert self.spec.eval_data is not None
        done = self._on_the_way.whole(self.step)
        started = time.perf_counter()
        scores = dict(done.scores) if done is not None else None
        if scores is None:
            scores = self.evaluate(self.spec.eval_data, None, should_stop, on_batch)
        if scores is not None:
            rows, seconds = int(scores.get("rows", 0)), time.perf_counter() - started
            self._announce(
                Evaluation(step=self.step, scores=scores, rows=rows, seconds=seconds, final=True)
            )
        return scores

    def _announce(self, event: ProgressReport | Evaluation | Saved) -> None:
        """Tell the run and this rank's callbacks of an event."""
        self._tell(event)
        self.hooks.event(event)

    def _report(
        self,
        merged: WindowSum,
        steps: int,
        rates: Mapping[str, float],
        step_s: Mapping[str, float],
        values: Mapping[str, float] | None = None,
    ) -> None:
        """Count a merged window of so many steps, and tell of it.

        Args:
            values: further scores, as the loop gives them.
        """
        self.rows += merged.rows
        self.seconds += merged.seconds
        self.loss = merged.loss
        # A nan is not below infinity, so both are found. All ranks see the same loss and raise
        # together.
        if not abs(merged.loss) < float("inf"):
            raise InputError(
                f"the loss is {merged.loss} in steps {self.step - steps + 1} to {self.step}: "
                "training has diverged. Lower the learning rates (sparse "
                f"{self.spec.sparse_optimizer.lr}, dense {self.spec.dense_optimizer.lr}) or look "
                "for huge values in the dense columns."
            )
        self._window_steps = next_length(steps, merged.seconds, self.spec.report_every_s)
        report = ProgressReport(
            step=self.step,
            rows=self.rows,
            rows_per_s=merged.rows / max(merged.seconds, 1e-9),
            loss=merged.loss,
            auc=first_of(merged.scores, "auc"),
            ne=first_of(merged.scores, "ne"),
            data_wait=merged.data_wait,
            scores={**merged.scores, **(values or {})},
            learning_rates=rates,
            memory_bytes=merged.memory_bytes,
            step_s=dict(step_s),
        )
        self._announce(report)

    @property
    def _save_every(self) -> int | None:
        """Steps between two checkpoints; None where none is saved on the way."""
        return self.spec.checkpoint.every_n_steps if self.spec.run_path else None

    def save(self, path: str | None = None) -> str:
        """Write a checkpoint, by default into the run's folder under the number of the step.

        Returns:
            where it lies.
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
            is_best = self._on_the_way.keeps_best and best.step == self.step
            seconds = time.perf_counter() - started
            self._saving = Saved(step=self.step, path=where, seconds=seconds, best=is_best)
        if not self._keeper.saver.under_way:
            self._finish_save()
        return where

    @property
    def _written(self) -> bool:
        """Whether this rank's part of a checkpoint behind the training is over."""
        return self._kept is not None and self._kept.saver.done

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and tell of it.

        Raises:
            SaveError: on every rank, when any of them could not write.
        """
        saving, self._saving = self._saving, None
        if self._kept is not None:
            self._kept.finish()
        if saving is not None:
            self._announce(saving)

    def _leave_save(self) -> None:
        """Leave a checkpoint that is being written, since this rank leaves its world."""
        if self._kept is not None:
            self._kept.saver.give_up()
        if self._publisher is not None:
            self._publisher.give_up()

    def begin(self, note: Callable[[str], None] = lambda line: None) -> Began:
        """Start anew, from another run's weights, from a checkpoint or from a sync point.

        See `Keeper.begin` and `open_points`.
        """
        if self._publisher is not None:
            self._publisher.rebase()
        point = None if self._points is None else self._points.chosen
        if point is not None and self.model.undo is not None:
            self._on_phase("undoing steps")
            self.step = self._keeper.recall(self.model.undo.go_back(point), note)
        else:
            self.step = self._keeper.begin(note)
        self.rows, self.seconds = self._keeper.trained
        self._on_the_way.resume(self._keeper.best)
        if point is None:
            self._sync()
        path, in_memory = self._keeper.begun_from, point is not None
        return Began(step=self.step, path=path, in_memory=in_memory)

    def restore(self, path: str, *, weights_only: bool = False) -> None:
        """Continue from a checkpoint; see `Keeper.restore`."""
        self._finish_save()
        if self.model.undo is not None:
            self.model.undo.forget()
        if self._publisher is not None:
            self._publisher.rebase()
        self.step = self._keeper.restore(path, weights_only=weights_only)
        self._on_the_way.resume(self._keeper.best)

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint of the run, or None."""
        return self._kept.newest if self._kept is not None else None
