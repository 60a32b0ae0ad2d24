"""`RankRun`: base of a rank's training loop; does all of a training but its steps.

It keeps the data cursor, saves and restores, evaluates during training, and merges windows into
reports. `RankTrainer` is the ready-made loop on top of it, and `LoopContext` serves a loop of the
user's own. All ranks call the same methods together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.errors import InputError
from rayrec.train import hand_over
from rayrec.train.callbacks import Hooks
from rayrec.train.config import TrainSpec
from rayrec.train.data_cursor import DataCursor
from rayrec.train.evaluation_schedule import EvaluationSchedule
from rayrec.train.events import Evaluation, Event, ProgressReport
from rayrec.train.rank_saves import SavingRank
from rayrec.train.scoring import first_of
from rayrec.train.sync_points import open_points
from rayrec.train.table_optimizers import optimizers_of
from rayrec.train.window import WindowSum, even_length, next_length


class RankRun(SavingRank):
    """One rank of a run.

    Args:
        spec: the run.
        device: device of this rank.
        on_phase: receives the current phase, in words that complete "while ...".
    Attributes:
        model: the sharded model.
        step: global steps done.
        rows, seconds: rows of training and its duration in this run, over all ranks.
        loss: mean loss over the rows of the last window.
        hooks: callbacks of this rank.
        save_asked: returns True if this rank was asked to save at the end of its window.
    """

    def __init__(
        self, spec: TrainSpec, device: torch.device | str, on_phase: Callable[[str], None]
    ) -> None:
        super().__init__()
        if not spec.handed_over:
            # before the model takes memory: what is left of a change that failed
            hand_over.keep(None)
        self.spec, self.device, self._on_phase = spec, torch.device(device), on_phase
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.step, self.rows, self.seconds = 0, 0, 0.0
        self.loss: float | None = None
        self.hooks = Hooks(spec.rank_callbacks, f"rank {self.rank}", self)
        self._schedule = EvaluationSchedule(spec)
        self._tell: Callable[[Event], None] = lambda event: None
        self._cursor = DataCursor(
            spec, self.rank, self.world_size, pin_memory=self.device.type == "cuda"
        )
        self._window_steps = 1
        self._points = open_points(spec.sync_points, self.rank, self.device)
        # a run that scores alone does not publish
        self._publishes = spec.publish is not None and spec.data is not None
        # replaced by the loop's own, which asks the driver
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

    @property
    def early(self) -> str:
        """Reason of early stopping, or ""."""
        return self._schedule.early

    def _after_window(self, merged: WindowSum, should_stop: Callable[[], bool]) -> bool:
        """Evaluate and save if that is due at this step; return True if the run was stopped.

        Windows end where an evaluation or a save is due, so none is missed.
        """
        stopped = merged.stop
        if merged.written:
            self._finish_save()
        # a node will go: not after an evaluation, which may take its time
        if merged.save and self.spec.run_path:
            self.save()
        if self._schedule.due(self.step, merged.seconds) and not stopped:
            stopped = not self._evaluate(should_stop)
        self._since_save_s += merged.seconds
        if self._save_every.due(self.step, self._since_save_s):
            self.save()
        if self._points is not None and self._points.every.due(self.step):
            self._sync()
        if self._publisher is not None:
            self._publisher.after_window(self.step, merged.seconds)
        return stopped

    def _make_up(self, should_stop: Callable[[], bool]) -> bool:
        """Make an evaluation that a stop at this step had left out; return False if stopped."""
        return not self._schedule.missed(self.step) or self._evaluate(should_stop)

    def _end_run(self, stopped: bool) -> None:
        """Save the last checkpoint, and raise the error of a callback of this rank, if any."""
        if self._kept is not None:
            self._kept.ending = True
        self.handed_over = stopped and self._hand_over(may=self.hooks.error is None)
        saves = self.spec.run_path and self.spec.checkpoint.at_end and self.step
        if saves and not self.handed_over:
            self.save()
        if self._publisher is not None:
            self._publisher.at_end(self.step)
        self._finish_save()
        if self.hooks.error is not None:
            raise self.hooks.error

    def _next_end(self) -> int:
        """Return the next step at which an evaluation, save, sync point or publication is due."""
        ends = [self.spec.steps, self._schedule.next_step(self.step)]
        ends.append(self._save_every.next_step(self.step))
        if self._points is not None:
            ends.append(self._points.every.next_step(self.step))
        if self._publisher is not None:
            ends.append(self._publisher.next_step(self.step))
        return min(end for end in ends if end is not None)

    def _report_end(self) -> int:
        """Return the step of the next report, with windows of about equal length up to `_next_end`.

        A window that ends early because of a stop is saved, and no checkpoint holds half-summed
        gradients, so windows end at multiples of `accumulate`.
        """
        group = self.spec.accumulate
        steps = even_length(self._window_steps, self._next_end() - self.step)
        return -(-(self.step + steps) // group) * group

    def _evaluate(self, should_stop: Callable[[], bool]) -> bool:
        """Score the evaluation data during training; return False if stopped in between."""
        assert self.spec.eval_data is not None
        self._on_phase("evaluating")
        started = time.perf_counter()
        scores = self.evaluate(self.spec.eval_data, None, should_stop, sample=self._schedule.rows)
        self._on_phase("training")
        if scores is None:
            return False
        evaluation = self._schedule.judge(self.step, scores, time.perf_counter() - started)
        self._announce(evaluation)
        if evaluation.best and self._schedule.keeps_best and self.spec.run_path:
            self.save()
        return True

    def final_scores(
        self, should_stop: Callable[[], bool], on_batch: Callable[[], None]
    ) -> dict[str, float] | None:
        """Score all evaluation data after training; return None when the evaluation was stopped."""
        assert self.spec.eval_data is not None
        done = self._schedule.whole(self.step)
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

    def _report(
        self,
        merged: WindowSum,
        steps: int,
        rates: Mapping[str, float],
        step_s: Mapping[str, float],
        values: Mapping[str, float] | None = None,
    ) -> None:
        """Count a merged window of `steps` steps, and report it.

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
