"""`RankTrainer`: one rank's whole training, in any process that is in a process group (or alone).
No Ray in it.

All ranks hold the same spec and do the same things in the same order: as many steps as the spec and
the dataset's metadata say, a merged window every few seconds, checkpoints at fixed steps. So nobody
asks anybody how to go on, except for one agreement at the end of each window: whether to stop.
Batches are read and their ids exchanged ahead, during the step before (`pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.errors import InputError
from rayrec.metrics import BinaryScores
from rayrec.observe.timer import StepTimer
from rayrec.observe.times import RankTimes
from rayrec.train.config import Dataset, TrainSpec
from rayrec.train.evaluation import Part, evaluate
from rayrec.train.keeper import Keeper
from rayrec.train.pipeline import TrainPipelineSparseDist
from rayrec.train.place import Place
from rayrec.train.predictions import PredictionConfig
from rayrec.train.profile import profile_steps
from rayrec.train.profile_page import Profile, check_folder
from rayrec.train.progress import ProgressReport
from rayrec.train.step import checked, summarize
from rayrec.train.times import StepTimes
from rayrec.train.window import Window, gather_objects, next_length


class RankTrainer:
    """Builds the model on this rank and trains, evaluates, saves and restores it; all ranks call
    the same methods together.

    Args:
        spec: the run.
        device: of this rank.
        on_phase: gets what the trainer is doing, in words that complete "while ...".
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
        torch.manual_seed(spec.seed)
        module = spec.model()
        self.tables = table_configs(module)
        self.model = DistributedModelParallel(
            module,
            plan=spec.plan,
            sparse_optimizer=spec.tables_optimizer,
            device=self.device,
            seed=spec.seed,
            qcomms=spec.qcomms,
            prefetch=True,
            share_tables=spec.share_tables,
        )
        parameters = [p for _, p in self.model.dense_parameters()]
        self._dense = spec.dense_optimizer.make_dense(parameters) if parameters else None
        self.step, self.rows, self.seconds = 0, 0, 0.0
        self.loss: float | None = None
        self.profile: Profile | None = None
        self._place = Place(spec, self.rank, self.world_size, pin_memory=self.device.type == "cuda")
        self._keeper = Keeper(
            spec, self.model, self.tables, self._dense, self._place, self.rank, self.world_size
        )
        self._window_steps = 1
        if self.device.type == "cpu":  # a GPU's parts would have to be waited for
            self.model.timer = StepTimer()
        self._times = StepTimes(self.model.timer, warm_up=True)
        self._pipeline = TrainPipelineSparseDist(
            self.model, self._dense, self.device, world_size=self.world_size
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
        on_report: Callable[[ProgressReport], None] = lambda report: None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> bool:
        """Train until the spec's number of steps is done or some rank is asked to stop; saves on
        the way as the spec says.

        Args:
            should_stop: read at the end of each window; one rank's True stops all.
            on_report: gets each window, merged, on every rank.
            on_step: gets the number of finished steps after each step.
        Returns:
            True when it was stopped.
        Raises:
            ConfigError: a profile cannot be written, or needs more steps.
            InputError: a batch is not what the model takes, or the loss is no longer finite.
            CommError: another rank is gone.
        """
        self.model.train()
        self._on_phase("reading the first batch")
        batches = self._place.batches()
        every = self.spec.checkpoint.every_n_steps if self.spec.run_path else None
        profile_at = self._profile_at()
        stopped = False

        def train(wanted: int) -> bool:
            """Up to a step, in windows that end where checkpoints are due; whether it was stopped."""
            stop = False
            while self.step < wanted and not stop:
                end = min(wanted, (self.step // every + 1) * every) if every else wanted
                stop = self._train_to(end, batches, should_stop, on_report, on_step)
                if every and self.step % every == 0:
                    self.save()
            return stop

        try:
            while self.step < self.spec.steps and not stopped:
                if self.step == profile_at:
                    stopped = self._profile(train)
                    continue
                wanted = min(self.step + self._window_steps, self.spec.steps)
                stopped = train(min(wanted, profile_at) if self.step < profile_at else wanted)
        finally:
            self._pipeline.reset()
            batches.close()
        if self.spec.run_path and self.spec.checkpoint.at_end and self.step:
            self.save()
        return stopped

    def _train_to(
        self,
        end: int,
        batches: Iterator[Any],
        should_stop: Callable[[], bool],
        on_report: Callable[[ProgressReport], None],
        on_step: Callable[[int], None],
    ) -> bool:
        """One window, up to step `end`."""
        window = Window(self.device, self.world_size)
        self._times.begin()
        first, waited_s = self.step, self._pipeline.data_wait_s
        while self.step < end:
            done = self._pipeline.advance(batches)
            window.add(summarize(checked((done.loss, done.output)), done.batch.rows))
            self._place.advance()
            self.step += 1
            on_step(self.step)
            if self.step == first + 1:
                self._on_phase("training")
        self._times.add(window.steps)
        total = window.merge(should_stop, self._pipeline.data_wait_s - waited_s)
        self.rows += total.rows
        self.seconds += total.seconds
        self.loss = total.loss
        if not abs(total.loss) < float("inf"):
            raise InputError(
                f"the loss is {total.loss} in steps {first + 1} to {self.step}: training has "
                "diverged. "
                f"Lower the learning rates (sparse {self.spec.sparse_optimizer.lr}, dense "
                f"{self.spec.dense_optimizer.lr}) "
                "or look for huge values in the dense columns."
            )
        self._window_steps = next_length(window.steps, total.seconds, self.spec.report_every_s)
        speed = total.rows / max(total.seconds, 1e-9)
        on_report(
            ProgressReport(
                step=self.step,
                rows=self.rows,
                rows_per_s=speed,
                loss=total.loss,
                auc=total.auc,
                ne=total.ne,
                data_wait=total.data_wait,
            )
        )
        return total.stop

    def _profile_at(self) -> int:
        """The step before which to profile, or -1."""
        config = self.spec.profile
        if config is None:
            return -1
        config.check_steps(self.spec.steps - self.step)
        check_folder(config.path)
        return self.step + config.skip_steps

    def _profile(self, train: Callable[[int], bool]) -> bool:
        """Profile the next steps, which `train` does; whether it was stopped. Their times are no
        part of the run's.
        """
        assert self.spec.profile is not None
        stopped = False

        def run(times: StepTimes, steps: int) -> bool:
            nonlocal stopped
            kept, self._times = self._times, times
            stopped = train(self.step + steps)
            self._times = kept
            return stopped

        self.profile = profile_steps(
            self.model, self.spec.profile, run, rank=self.rank, first_step=self.step + 1
        )
        return stopped

    def times(self) -> tuple[RankTimes, ...]:
        """Where the time of the mean step went, of every rank on every rank; empty where it was not
        measured.
        """
        return tuple(times for times in gather_objects(self._times.mean()) if times is not None)

    def evaluate(
        self,
        data: Dataset,
        predictions: PredictionConfig | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_batch: Callable[[], None] = lambda: None,
    ) -> BinaryScores | None:
        """Score the model on all rows of `data`; see `rayrec.train.evaluation.evaluate`."""
        part = Part(self.rank, self.world_size, self.spec.global_batch_size)
        return evaluate(self.model, data, part, self.device, predictions, should_stop, on_batch)

    def save(self, path: str | None = None) -> str:
        """Write a checkpoint, by default into the run's folder under the number of the step;
        returns where.

        Raises:
            SaveError: on every rank, when any of them could not write.
        """
        self._on_phase("saving a checkpoint")
        where = self._keeper.save(self.step, path)
        self._on_phase("training")
        return where

    def begin(self, note: Callable[[str], None] = lambda line: None) -> None:
        """Start where the spec says: anew, from the weights of another run, or from a checkpoint;
        see `Keeper.begin`.
        """
        self.step = self._keeper.begin(note)

    def restore(self, path: str, *, weights_only: bool = False) -> None:
        """Continue from a checkpoint; see `Keeper.restore`."""
        self.step = self._keeper.restore(path, weights_only=weights_only)

    @property
    def checkpoint(self) -> str | None:
        """Path of the newest checkpoint of the run, or None."""
        return self._keeper.newest
