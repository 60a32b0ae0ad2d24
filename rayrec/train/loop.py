"""`RankTrainer`: one rank's whole training, in any process that is in a process group (or alone).

All ranks hold the same spec and do the same things in the same order: as many steps as the spec and
the dataset's metadata say, a merged window every few seconds, checkpoints at fixed steps. So nobody
asks anybody how to go on, except for one agreement at the end of each window: whether to stop.
Batches are read and their ids exchanged ahead, during the step before (`pipeline`). No Ray here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.errors import ConfigError, InputError
from rayrec.layout import BaseEmbeddingConfig
from rayrec.observe.profile import Profiler
from rayrec.observe.step_times import StepTimes
from rayrec.observe.timer import StepTimer
from rayrec.observe.times import RankTimes
from rayrec.report.profile_page import Profile, check_folder
from rayrec.spec.optimizers import SparseOptimizer
from rayrec.train.callbacks import Hooks
from rayrec.train.config import Dataset, TrainSpec
from rayrec.train.evaluation import Part, evaluate
from rayrec.train.keeper import Keeper
from rayrec.train.on_the_way import OnTheWay
from rayrec.train.pipeline import PipelineOptions, TrainPipelineSparseDist
from rayrec.train.place import Place
from rayrec.train.predictions import PredictionConfig
from rayrec.train.progress import Evaluation, Event, ProgressReport, Saved
from rayrec.train.rates import LearningRates, clip_dense
from rayrec.train.scoring import first_of
from rayrec.train.shaping import Best
from rayrec.train.step import checked, summarize
from rayrec.train.window import Window, WindowSum, gather_objects, next_length

# batches; a block of shuffled rows is decoded for several at once
READ_AHEAD = 4


class RankTrainer:
    """Builds the model on this rank and trains, evaluates, saves and restores it.

    All ranks call the same methods together.

    Args:
        spec: the run.
        device: of this rank.
        on_phase: gets what the trainer is doing, in words that complete "while ...".
    Attributes:
        step: global steps done.
        rows, seconds: trained on and taken by this run, over all ranks.
        loss: mean over the rows of the last window.
        profile: of this run, once it is made.
    Raises:
        ConfigError: the model holds nothing to shard or an optimizer is unknown.
        PlanError: the plan is not for this model or this many ranks.
    """

    def __init__(
        self,
        spec: TrainSpec,
        device: torch.device | str = "cpu",
        on_phase: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.spec, self.device, self._on_phase = spec, torch.device(device), on_phase
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        # Dense layers are made on every rank and must be equal, so all ranks draw the same numbers.
        torch.manual_seed(spec.seed)
        module = spec.model()
        self.tables = table_configs(module)
        self.model = DistributedModelParallel(
            module,
            plan=spec.plan,
            sparse_optimizer=optimizers_of(spec, self.tables),
            device=self.device,
            seed=spec.seed,
            qcomms=spec.qcomms,
            prefetch=True,
            share_tables=spec.share_tables,
        )
        parameters = [p for _, p in self.model.dense_parameters()]
        self._dense = spec.dense_optimizer.make_dense(parameters) if parameters else None
        self._rates = LearningRates(spec, self.model, self._dense)
        clip_dense(spec, self._dense)
        self.hooks = Hooks(spec.rank_callbacks, f"rank {self.rank}", self)
        self._on_the_way = OnTheWay(spec)
        self.step, self.rows, self.seconds = 0, 0, 0.0
        self.loss: float | None = None
        self.profile: Profile | None = None
        self._tell: Callable[[Event], None] = lambda event: None
        self._place = Place(spec, self.rank, self.world_size, pin_memory=self.device.type == "cuda")
        self._keeper = Keeper(
            spec, self.model, self.tables, self._dense, self._place, self.rank, self.world_size
        )
        self._window_steps = 1
        # a GPU's parts would have to be waited for
        if self.device.type == "cpu":
            self.model.timer = StepTimer()
        self._times = StepTimes(self.model.timer, warm_up=True)
        self._pipeline = TrainPipelineSparseDist(
            self.model,
            self._dense,
            self.device,
            PipelineOptions(
                read_ahead=READ_AHEAD, accumulate=spec.accumulate, autocast=self._autocast
            ),
            world_size=self.world_size,
        )

    def __enter__(self) -> RankTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def close(self, wait: bool = True) -> None:
        """End the threads that work ahead; see `DistributedModelParallel.close`."""
        self._pipeline.close()
        self.model.close(wait)

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_event: Callable[[Event], None] = lambda event: None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> bool:
        """Train until the spec's steps are done, early stopping ends it, or some rank is asked to.

        Checkpoints are saved and evaluations made on the way and at the end as the spec says.

        Args:
            should_stop: read at the end of each window; one rank's True stops all.
            on_event: gets each window, evaluation and checkpoint, merged, on every rank.
            on_step: gets the number of finished steps after each step.
        Returns:
            True when it was stopped, by `should_stop` or a callback that raised.
        Raises:
            CallbackError: a callback of this rank raised; what the run keeps was saved.
            ConfigError: a profile cannot be written, or needs more steps.
            InputError: a batch is not what the model takes, or the loss is no longer finite.
            CommError: another rank is gone.
        """
        self._tell = on_event
        self.model.train()
        self._on_phase("reading the first batch")
        batches = self._place.batches()
        profiler = self._profiler()
        stopped = False
        try:
            while self.step < self.spec.steps and not stopped and not self.early:
                # Steps of a profile are counted apart from the mean that prices are compared with.
                times = profiler.times if profiler and profiler.times else self._times
                window, waited_s = self._steps(self._window_end(profiler), batches, times, on_step)
                merged = window.merge(
                    lambda: should_stop() or self.hooks.error is not None, waited_s
                )
                self._report(merged, window.steps)
                stopped = merged.stop
                # Windows end where an evaluation or a save is due, so none is missed.
                if self._on_the_way.due(self.step, merged.seconds) and not stopped:
                    stopped = not self._evaluate(should_stop)
                if self._save_every and self.step % self._save_every == 0:
                    self.save()
                if profiler is not None:
                    profiler.turn(self.step, stopped)
                    self.profile = profiler.result
        finally:
            if profiler is not None:
                profiler.close()
            # first the thread that reads them
            self._pipeline.reset()
            batches.close()
        if self.spec.run_path and self.spec.checkpoint.at_end and self.step:
            self.save()
        if self.hooks.error is not None:
            raise self.hooks.error
        return stopped

    @property
    def early(self) -> str:
        """Why early stopping ended the run, or ""."""
        return self._on_the_way.early

    @property
    def best(self) -> Best:
        """The best evaluation of the run so far."""
        return self._on_the_way.best

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

    def _steps(
        self, end: int, batches: Iterator[Any], times: StepTimes, on_step: Callable[[int], None]
    ) -> tuple[Window, float]:
        """The window of the steps up to `end`, and the seconds that it waited for batches."""
        spec = self.spec
        window = Window(self.device, self.world_size, spec.tasks)
        times.begin()
        first, waited_s = self.step + 1, self._pipeline.data_wait_s
        while self.step < end:
            # nothing here waits for the device: losses and scores are summed there
            self._rates.before(self.step)
            # the dense layers are updated at multiples, and from what there is at the end
            number = self.step + 1
            update = number % spec.accumulate == 0 or number == spec.steps
            done = self._pipeline.advance(batches, update)
            window.add(summarize(checked((done.loss, done.output)), done.batch.rows))
            self._place.advance()
            self.step += 1
            on_step(self.step)
            self.hooks.step(self.step)
            if self.step == first:
                self._on_phase("training")
        times.add(window.steps)
        return window, self._pipeline.data_wait_s - waited_s

    def _window_end(self, profiler: Profiler | None) -> int:
        """The step that ends the next window: a report, a save or a part of a profile is due."""
        ends = [self.spec.steps]
        if self._save_every:
            ends.append((self.step // self._save_every + 1) * self._save_every)
        if profiler is not None and profiler.due is not None:
            ends.append(profiler.due)
        evaluation = self._on_the_way.next_step(self.step)
        if evaluation is not None:
            ends.append(evaluation)
        if profiler is None or profiler.times is None:
            # A report amid the profile would show in its trace. A window that ends early because
            # of a stop is saved, and no checkpoint holds half-summed gradients.
            group = self.spec.accumulate
            ends.append(-(-(self.step + self._window_steps) // group) * group)
        return min(ends)

    def _report(self, merged: WindowSum, steps: int) -> None:
        """Count a merged window of so many steps, and tell of it."""
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
            scores=merged.scores,
            learning_rates=self._rates.now(),
            memory_bytes=merged.memory_bytes,
            step_s=dict(self._times.last),
        )
        self._announce(report)

    def _profiler(self) -> Profiler | None:
        """What profiles the steps of this run that the spec names, or None."""
        config = self.spec.profile
        if config is None:
            return None
        config.check_steps(self.spec.steps - self.step)
        check_folder(config.path)
        return Profiler(
            self.model,
            config.path,
            first_step=self.step + config.skip_steps + 1,
            steps=config.steps,
            rank=self.rank,
            gather=gather_objects,
        )

    @property
    def _save_every(self) -> int | None:
        """Steps between two checkpoints; None where none is saved on the way."""
        return self.spec.checkpoint.every_n_steps if self.spec.run_path else None

    def times(self) -> tuple[RankTimes, ...]:
        """The mean step of every rank, on every rank; empty where it was not measured."""
        return tuple(times for times in gather_objects(self._times.mean()) if times is not None)

    def evaluate(
        self,
        data: Dataset,
        predictions: PredictionConfig | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_batch: Callable[[], None] = lambda: None,
        sample: int | None = None,
    ) -> dict[str, float] | None:
        """Score the model on the rows of `data`; see `rayrec.train.evaluation.evaluate`."""
        return evaluate(
            self.model,
            data,
            Part(self.rank, self.world_size, self.spec.global_batch_size),
            self.device,
            predictions,
            should_stop,
            on_batch,
            tasks=self.spec.tasks,
            sample=sample,
            autocast=self._autocast,
        )

    @property
    def _autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.spec.dense_dtype == "bfloat16" else None

    def save(self, path: str | None = None) -> str:
        """Write a checkpoint, by default into the run's folder under the number of the step.

        Returns:
            where it lies.
        Raises:
            SaveError: on every rank, when any of them could not write.
        """
        self._on_phase("saving a checkpoint")
        started, newest, best = time.perf_counter(), self._keeper.newest, self.best
        where = self._keeper.save(self.step, path, best)
        self._on_phase("training")
        if where != newest:
            is_best = self._on_the_way.keeps_best and best.step == self.step
            seconds = time.perf_counter() - started
            self._announce(Saved(step=self.step, path=where, seconds=seconds, best=is_best))
        return where

    def begin(self, note: Callable[[str], None] = lambda line: None) -> None:
        """Start anew, from another run's weights, or from a checkpoint; see `Keeper.begin`."""
        self.step = self._keeper.begin(note)
        self._on_the_way.resume(self._keeper.best)

    def restore(self, path: str, *, weights_only: bool = False) -> None:
        """Continue from a checkpoint; see `Keeper.restore`."""
        self.step = self._keeper.restore(path, weights_only=weights_only)
        self._on_the_way.resume(self._keeper.best)

    @property
    def checkpoint(self) -> str | None:
        """Path of the newest checkpoint of the run, or None."""
        return self._keeper.newest


def optimizers_of(
    spec: TrainSpec, tables: Sequence[BaseEmbeddingConfig]
) -> SparseOptimizer | dict[str, SparseOptimizer]:
    """The optimizer of all tables, or one per table where some have their own.

    Raises:
        ConfigError: an optimizer is given for a table that the model does not have.
    """
    own = spec.own_optimizers
    if not own:
        return spec.tables_optimizer
    names = {table.name for table in tables}
    unknown = sorted(set(own) - names)
    if unknown:
        raise ConfigError(
            f"table_optimizers names the table {unknown[0]!r}; the model's tables are "
            f"{', '.join(sorted(names))}."
        )
    return {name: own.get(name, spec.tables_optimizer) for name in names}
