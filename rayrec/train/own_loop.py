"""A training loop of the user's own under the driver: `fn(context)`, called on every rank.

The driver places and plans, starts the ranks, watches them and shows their progress, as for the
ready-made loop; `LoopContext` gives the loop the same pieces that `RankTrainer` is made of: the
run's batches from its place in the data on, windows and reports, evaluations and checkpoints.
All ranks must do the same in the same order, as in any program of torch.distributed.

    def loop(context):
        model = context.shard(build())
        optimizer = torch.optim.Adam([p for _, p in model.dense_parameters()])
        context.track(optimizer)
        for batch in context.batches():
            loss, (_, logits, labels) = model(batch)
            optimizer.zero_grad()
            (loss * context.loss_weight(batch)).backward()
            optimizer.step()
            context.report(loss, logits, labels)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.train.config import TrainSpec
from rayrec.train.events import Began
from rayrec.train.outcome import FitOutcome
from rayrec.train.rank_run import RankRun
from rayrec.train.seat import RankContext
from rayrec.train.step import Rows, StepResult, share_of, summarize
from rayrec.train.window import Window


class LoopContext(RankRun):
    """Context of a user's training loop on its rank.

    Attributes:
        rank, world_size: index of this rank, and number of ranks.
        device: device of this rank.
        spec: the run.
        step: global steps done; `batches` counts them.
    """

    def __init__(self, spec: TrainSpec, context: RankContext) -> None:
        super().__init__(spec, context.device, context.phase)
        self._context, self._live.tell = context, context.report
        self.save_asked, self.going_to = context.save_asked, context.going_to
        self._window: Window | None = None
        self._told: tuple[Tensor, Any, Any] | None = None
        self._stands_for: Rows = None
        self._values: Mapping[str, float] = {}

    @property
    def plan(self) -> ShardingPlan:
        """Sharding plan of the tables."""
        return self.spec.plan

    def build(self) -> torch.nn.Module:
        """Build the module that the driver was given; the driver planned for its tables."""
        return self.spec.model()

    def track(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Register the optimizer, which checkpoints hold, too, and go to the run's starting point.

        It fills the model and the optimizer from the checkpoint that the run continues from, or
        from the weights that it begins with, and moves `step` and the place in the data there.

        Args:
            optimizer: optimizer of the dense parameters, as `RunConfig.dense_optimizer` names it
                when a run is to be continued.
        Raises:
            ConfigError: nothing was sharded yet; or the checkpoint is of another run.
            CheckpointError: it is missing, damaged or of another model.
        """
        if not hasattr(self, "model"):
            raise ConfigError("context.track comes after context.shard(module).")
        self._track(optimizer)
        self._context.phase("starting")
        began = self.begin(self._context.report)
        self._context.at_step(self.step)
        self._context.mark("model and tables made")
        self._context.report(began)

    def batches(self) -> Iterator[Any]:
        """This rank's batches on its device, from the place of the run on, until its last step.

        A step counts as done when the loop asks for the next batch. Between steps, windows are
        merged and told, evaluations made and checkpoints saved, as the run says. The iterator ends
        early, on all ranks together, when the run is stopped.

        Raises:
            ConfigError: the run keeps or continues from checkpoints, and `track` was not called.
            CallbackError: a callback of this rank raised; what the run keeps was saved.
            InputError: the data hold what a batch cannot; or a reported loss is not finite.
        """
        spec, live = self.spec, self._live
        keeps = spec.run_path or spec.resume_from or spec.init_from or spec.sync_points
        if keeps or self._publishes:
            _ = self._loop.checkpoints  # raises where nothing is tracked
        if not hasattr(self, "model"):
            raise ConfigError("call context.shard(module) before context.batches().")
        if self._loop.saves is None:
            self._context.report(Began(step=self.step, path=None))
        self.model.train()
        source = live.cursor.batches()
        first = self.step + 1
        try:
            for window in self._loop.windows(self._context.should_stop, self.save_asked):
                while self.step < window.end:
                    started = time.perf_counter()
                    batch = next(source)
                    window.waited_s += time.perf_counter() - started
                    if self.device.type != "cpu":
                        batch = batch.to(self.device, non_blocking=True)
                    self._told = self._stands_for = None
                    yield batch
                    window.add(self._result(batch), batch)
                    self._count_step(first)
                window.values = self._values
        finally:
            source.close()
        self._loop.end(self.going_to)

    def loss_weight(self, batch: Any) -> float | Tensor:
        """Return the factor of this rank's mean loss before the backward pass, with which all ranks
        together train on the mean over the global batch; see `rayrec.train.step`. All ranks call
        it once per batch, after its forward pass.
        """
        weight, self._stands_for = share_of(self.model, batch, self.world_size, self.device)
        return weight

    def report(
        self,
        loss: Tensor,
        logits: Tensor | Mapping[str, Tensor] | None = None,
        labels: Tensor | Mapping[str, Tensor] | None = None,
        scores: Mapping[str, float] | None = None,
    ) -> None:
        """Report the current step; it is merged with the other steps and ranks of its window.

        Args:
            loss: () mean over this rank's rows of the batch.
            logits, labels: predictions and labels of the rows, by task where the run has several.
            scores: further numbers, shown and logged as rank 0 gives them.
        """
        self._told = loss, logits, labels
        if scores is not None:
            self._values = dict(scores)

    def checkpoint(self) -> str:
        """Save a checkpoint of the steps done until now; call it between two batches' steps.

        Returns:
            the path; with `CheckpointConfig(asynchronous=True)` the checkpoint may still be written
            when this returns.
        Raises:
            ConfigError: the run has no storage path, or `track` was not called.
            SaveError: on every rank, when any of them could not write.
        """
        return self.save()

    def should_stop(self) -> bool:
        """Return True if this rank was asked to stop; `batches` ends by itself soon after."""
        return self._context.should_stop()

    def _result(self, batch: Any) -> StepResult:
        """Return the reported step of a batch; a step without a report has a loss of 0."""
        loss, logits, labels = self._told or (torch.zeros((), device=self.device), None, None)
        if logits is None or labels is None:
            logits = labels = {}  # which are not scored
        return summarize((loss, logits, labels), batch.rows, self._stands_for)

    def _count_step(self, first: int) -> None:
        self._live.cursor.advance()
        self._live.step += 1
        self._context.at_step(self.step)
        self.hooks.step(self.step)
        if self.step == first:
            self._context.mark("first step")
            self._context.phase("training")


TrainLoop = Callable[[LoopContext], Mapping[str, float] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopTask:
    """Run a loop of the user's own.

    Attributes:
        loop: called on every rank; the scores that it returns become those of the result, and every
            rank must return the same. None scores the evaluation data, where there are any.
    """

    spec: TrainSpec
    loop: TrainLoop

    def run(self, context: RankContext) -> FitOutcome:
        """Run the loop on this rank, together with all ranks."""
        context.mark("ranks connected")
        context.phase("making the model and its tables")
        own = LoopContext(self.spec, context)
        try:
            scores = self.loop(own)
            own._loop.finish()  # a loop may leave `batches` before their end
            if scores is None and self.spec.eval_data is not None and not own.stopped:
                context.phase("evaluating")
                scores = own.final_scores(context.should_stop, context.beat)
        except Exception as error:
            own.hooks.end(error, own.step)
            own._loop.give_up()
            raise
        finally:
            if hasattr(own, "model"):
                own.model.close(wait=False)
        own.hooks.end(None, own.step)
        if own.hooks.error is not None:
            raise own.hooks.error
        return FitOutcome.of(own, dict(scores or {}), stopped=own.stopped)
