"""`RankTrainer`: one rank's whole training, in any process that is in a process group (or alone).

All ranks hold the same spec and do the same things in the same order: as many steps as the spec and
the dataset's metadata say, a merged window every few seconds, checkpoints at fixed steps. So nobody
asks anybody how to go on, except for one agreement at the end of each window: whether to stop.
`RunLoop` goes over the windows; the steps inside of one are here. Batches are read and
their ids exchanged ahead, during the step before (`pipeline`). No Ray here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from rayrec.observe.profile import Profiler
from rayrec.observe.profile_summary import Profile, check_folder
from rayrec.observe.step_times import StepTimes
from rayrec.observe.timer import StepTimer
from rayrec.observe.times import RankTimes
from rayrec.train.config import TrainSpec
from rayrec.train.events import Event
from rayrec.train.pipeline import PipelineOptions, TrainPipelineSparseDist
from rayrec.train.rank_run import RankRun
from rayrec.train.rates import LearningRates, clip_dense
from rayrec.train.step import checked, summarize
from rayrec.train.window import Window, gather_objects

Batches = Generator[Any, None, None]
# batches; a block of shuffled rows is decoded for several at once
READ_AHEAD = 4


class RankTrainer(RankRun):
    """Builds the model on this rank and trains, evaluates, saves and restores it.

    All ranks call the same methods together.

    Args:
        spec: the run.
        device: device of this rank.
        on_phase: receives the current phase, in words that complete "while ...".
    Attributes:
        profile: profile of this run, once it is complete.
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
        super().__init__(spec, device, on_phase)
        # a restore writes every row, or ends the run
        is_restored = spec.handed_over or bool(spec.resume_from)
        self.shard(spec.model(), prefetch=True, initialize=not is_restored)
        parameters = [p for _, p in self.model.dense_parameters()]
        self._dense = None
        if parameters:
            self._dense = spec.dense_optimizer.make_dense(parameters, self.model.module)
        self._rates = LearningRates(spec, self.model, self._dense)
        clip_dense(spec, self._dense)
        self._track(self._dense)
        self.profile: Profile | None = None
        # a GPU's parts would have to be waited for
        if self.device.type == "cpu":
            self.model.timer = StepTimer()
        self._times = StepTimes(self.model.timer, warm_up=True)
        self._pipeline = TrainPipelineSparseDist(
            self.model,
            self._dense,
            self.device,
            PipelineOptions(
                read_ahead=READ_AHEAD, accumulate=spec.accumulate, autocast=self._live.autocast
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
        if wait:
            self._loop.finish()
        else:
            self._loop.give_up()
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
            on_event: receives each window, evaluation and checkpoint, merged, on every rank.
            on_step: receives the number of finished steps after each step.
        Returns:
            True when it was stopped, by `should_stop` or a callback that raised.
        Raises:
            CallbackError: a callback of this rank raised; what the run keeps was saved.
            ConfigError: a profile cannot be written, or needs more steps.
            InputError: a batch is not what the model takes, or the loss is no longer finite.
            CommError: another rank is gone.
        """
        live = self._live
        live.tell = on_event
        self.model.train()
        live.on_phase("reading the first batch")
        is_stream = self._loop.stream is not None
        batches: Batches | None = None if is_stream else live.cursor.batches()
        profiler, epoch = self._profiler(), live.cursor.epoch
        try:
            for window in self._loop.windows(should_stop, self.save_asked, profiler):
                if batches is None or (is_stream and epoch != live.cursor.epoch):
                    # a window of the stream was opened
                    self._pipeline.reset()
                    if batches is not None:
                        batches.close()
                    batches, epoch = live.cursor.batches(), live.cursor.epoch
                # Steps of a profile are counted apart from the mean that prices are compared with.
                times = profiler.times if profiler and profiler.times else self._times
                self._steps(window, batches, times, on_step)
        finally:
            if profiler is not None:
                self.profile = profiler.result
                profiler.close()
            # first the thread that reads them
            self._pipeline.reset()
            if batches is not None:
                batches.close()
            if self._loop.stream is not None:
                self._loop.stream.close()
        self._loop.end(self.going_to)
        return self.stopped

    def _steps(
        self,
        window: Window,
        batches: Iterator[Any],
        times: StepTimes,
        on_step: Callable[[int], None],
    ) -> None:
        """Take the steps of a window."""
        live, spec = self._live, self.spec
        times.begin()
        first, waited_s = live.step + 1, self._pipeline.data_wait_s
        while live.step < window.end:
            # nothing here waits for the device: losses and scores are summed there
            self._rates.before(live.step)
            # the dense layers are updated at multiples, and from what there is at the end
            number = live.step + 1
            update = number % spec.accumulate == 0 or number == spec.steps
            done = self._pipeline.advance(batches, update)
            result = checked((done.loss, done.output))
            window.add(summarize(result, done.batch.rows, done.rows), done.batch)
            live.cursor.advance()
            live.step = number
            on_step(number)
            self.hooks.step(number)
            if number == first:
                live.on_phase("training")
        times.add(window.steps)
        window.waited_s = self._pipeline.data_wait_s - waited_s
        window.rates, window.step_s = self._rates.now(), self._times.last

    def _profiler(self) -> Profiler | None:
        """Return the profiler of the steps that the spec names, or None."""
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

    def times(self) -> tuple[RankTimes, ...]:
        """Gather the times of the mean step of every rank; empty where they were not measured."""
        return tuple(times for times in gather_objects(self._times.mean()) if times is not None)
