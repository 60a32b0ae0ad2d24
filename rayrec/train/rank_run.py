"""`RankRun`: a run on one rank, put together from its parts, for `RankTrainer` and `LoopContext`.

The parts are the state of the run (`run_state`) and its loop over windows (`run_loop`), which has
the checkpoints, sync points and publications. `RankTrainer` takes the steps through a pipeline, and
`LoopContext` hands the batches to a loop of the user's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayrec.data import FileDataset
from rayrec.data.scored import Predicted, ScoredFolder
from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.train import bulk, evaluation, hand_over, starting
from rayrec.train.callbacks import Hooks
from rayrec.train.checkpoints import Checkpoints
from rayrec.train.config import Dataset, TrainSpec
from rayrec.train.evaluation_schedule import rows_of
from rayrec.train.events import Began, Evaluation
from rayrec.train.predictions import PredictionConfig
from rayrec.train.publisher import Publisher
from rayrec.train.random_state import seed_all
from rayrec.train.run_loop import RunLoop
from rayrec.train.run_state import LiveRun
from rayrec.train.shaping import Best
from rayrec.train.sync_points import open_points


def _never() -> bool:
    return False


class RankRun:
    """One rank of a run; all ranks call the same methods together.

    Args:
        spec: the run.
        device: device of this rank.
        on_phase: receives the current phase, in words that complete "while ...".
    Attributes:
        rank, world_size: index of this rank, and number of ranks.
        model: the sharded model.
        tables: configs of its tables.
        hooks: callbacks of this rank.
        save_asked: returns True if this rank was asked to save at the end of its window.
        going_to: returns the number of ranks that the driver wants to go on with, where it asked
            this rank to stop for that; else 0.
    """

    def __init__(
        self, spec: TrainSpec, device: torch.device | str, on_phase: Callable[[str], None]
    ) -> None:
        if not spec.handed_over:
            # before the model takes memory: what is left of a change that failed
            hand_over.keep(None)
        self.spec, self.device = spec, torch.device(device)
        self._live = LiveRun(spec, self.device, on_phase)
        self.rank, self.world_size = self._live.rank, self._live.world_size
        self.hooks = self._live.hooks = Hooks(spec.rank_callbacks, f"rank {self.rank}", self)
        points = open_points(spec.sync_points, self.rank, self.device)
        self._loop = RunLoop(self._live, points)
        # a run that scores alone does not publish
        self._publishes = spec.publish is not None and spec.data is not None
        # replaced by the loop's own, which ask the driver
        self.save_asked: Callable[[], bool] = _never
        self.going_to: Callable[[], int] = lambda: 0
        # Dense layers are made on every rank and must be equal, so all ranks draw the same numbers.
        seed_all(spec.seed)

    @property
    def step(self) -> int:
        """Global steps done."""
        return self._live.step

    @property
    def rows(self) -> int:
        """Rows of training in this run, over all ranks."""
        return self._live.rows

    @property
    def seconds(self) -> float:
        """Duration of the training in this run."""
        return self._live.seconds

    @property
    def loss(self) -> float | None:
        """Mean loss over the rows of the last window."""
        return self._loop.reports.loss

    @property
    def best(self) -> Best:
        """Best evaluation of the run so far."""
        return self._live.schedule.best

    @property
    def early(self) -> str:
        """Reason of early stopping, or ""."""
        return self._live.schedule.early

    @property
    def stopped(self) -> bool:
        """True if the run was stopped before its end."""
        return self._loop.stopped

    @property
    def handed_over(self) -> bool:
        """True if the ranks keep their tables for the next world, and have not saved them."""
        return self._loop.handed_over

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint of the run, or None."""
        return None if self._loop.saves is None else self._loop.saves.newest

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
        self.tables = self._live.tables = table_configs(module)
        chosen = {
            "qcomms": spec.qcomms,
            "share_tables": spec.share_tables,
            "sharding_group_size": spec.sharding_group_size,
            "sync_every": spec.sync_every,
            "track_rows": self._publishes or (spec.checkpoint.incremental and bool(spec.run_path)),
        }
        if self._loop.points is not None:
            chosen |= self._loop.points.options()
        self.model = self._live.model = DistributedModelParallel(
            module,
            plan=spec.plan,
            sparse_optimizer=spec.optimizers_of(self.tables),
            device=self.device,
            seed=spec.seed,
            **{**chosen, **options},
        )
        return self.model

    def _track(self, dense: torch.optim.Optimizer | None) -> None:
        """Open the checkpoints and publications of the sharded model and its dense optimizer."""
        self._live.dense = dense
        self._loop.saves = Checkpoints(self._live)
        if self._publishes:
            self._loop.publisher = Publisher(self._live)
            if self._loop.stream is not None:
                self._loop.publisher.newest = self._loop.stream.newest

    def begin(self, note: Callable[[str], None] = lambda line: None) -> Began:
        """Start anew, from another run's weights, from a checkpoint, from a sync point, or with the
        tables of the ranks before; see `starting.begin`.
        """
        loop, self._live.note = self._loop, note
        if loop.publisher is not None:
            loop.publisher.rebase()
        began = starting.begin(self._live, loop.checkpoints, loop.points)
        if loop.points is not None and loop.points.chosen is None:
            loop.points.set(self._live)
        return began

    def restore(self, path: str, *, weights_only: bool = False) -> None:
        """Resume a checkpoint of any number of ranks and any plan; see `starting.restore`."""
        self._loop.checkpoints.finish()
        self._loop.checkpoints.rebase()
        if self.model.undo is not None:
            self.model.undo.forget()
        if self._loop.publisher is not None:
            self._loop.publisher.rebase()
        starting.restore(self._live, self._loop.checkpoints, path, weights_only=weights_only)
        self._loop.growth.begin()

    def save(self, path: str | None = None) -> str:
        """Write a checkpoint, and return its path; see `Checkpoints.save`.

        A callback may call it before its window ends, and who resumes it does not look at the
        tables of that step again, so they grow before.
        """
        self._loop.grow()
        return self._loop.checkpoints.save(path)

    def id_lines(self) -> list[str]:
        """Return a line for each dynamic table: how many ids have a row, came and went."""
        return self._loop.reports.id_lines()

    def final_scores(
        self, should_stop: Callable[[], bool], on_batch: Callable[[], None]
    ) -> dict[str, float] | None:
        """Score all evaluation data after training; return None when the evaluation was stopped."""
        assert self.spec.eval_data is not None
        live, started = self._live, time.perf_counter()
        done = live.schedule.whole(live.step)
        scores = dict(done.scores) if done is not None else None
        if scores is None:
            scores = self.evaluate(self.spec.eval_data, None, should_stop, on_batch)
        if scores is not None:
            rows, seconds = rows_of(scores), time.perf_counter() - started
            live.announce(
                Evaluation(step=live.step, scores=scores, rows=rows, seconds=seconds, final=True)
            )
        return scores

    def evaluate(
        self,
        data: Dataset,
        predictions: PredictionConfig | None = None,
        should_stop: Callable[[], bool] = _never,
        on_batch: Callable[[], None] = lambda: None,
        sample: int | None = None,
    ) -> dict[str, float] | None:
        """Score the model on the rows of `data`; see `rayrec.train.evaluation.evaluate`."""
        return evaluation.evaluate(self._live, data, predictions, should_stop, on_batch, sample)

    def predict(
        self,
        data: FileDataset,
        folder: ScoredFolder,
        should_stop: Callable[[], bool] = _never,
        on_batch: Callable[[], None] = lambda: None,
        scores: Callable[[Any], Sequence[Tensor]] | None = None,
    ) -> Predicted | None:
        """Write the model's scores of the rows of `data`; see `rayrec.train.bulk.predict`."""
        return bulk.predict(self._live, data, folder, should_stop, on_batch, scores)
