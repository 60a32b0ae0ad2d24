"""`TrainSpec`, a training run as plain data that every rank receives alike, and the options in it.

The driver builds a `TrainSpec` from the user's RunConfig; a test or a notebook may build one by
hand and run a `RankTrainer` without Ray. Functions in it (model, data) travel by cloudpickle when
Ray carries it. The meaning of a run lies here and not in the number of ranks: steps are global
steps and batch sizes are rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rayrec.checks import positive, seconds, seed_number, whole_number
from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan
from rayrec.spec.optimizers import SparseOptimizer
from rayrec.spec.schedule import Schedule, ScheduleConfig, check_stages, stages_of
from rayrec.spec.task import Task
from rayrec.spec.wire import ExchangeOptions
from rayrec.streams import StreamDataset
from rayrec.train.callbacks import Callback
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.every import Every
from rayrec.train.optimizer_config import (
    DEFAULT_DENSE,
    DEFAULT_SPARSE,
    OptimizerConfig,
    as_optimizer,
)
from rayrec.train.profile_config import ProfileConfig
from rayrec.train.publish_config import PublishConfig
from rayrec.train.shaping import EvaluationConfig
from rayrec.train.world_mark import WorldMark

if TYPE_CHECKING:
    from torch import nn


ENDLESS = 10**12  # steps of a run that ends with its stream


class Dataset(Protocol):
    """Dataset as training reads it, such as `rayrec.data.ParquetDataset` and `ArrowDataset`."""

    @property
    def num_rows(self) -> int:
        """Rows in one epoch."""

    def num_batches(self, global_batch_size: int, drop_last: bool = False) -> int:
        """Global batches in one epoch."""

    def loader(
        self,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
        seed: int = 0,
        epoch: int = 0,
        start_batch: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """This rank's parts of the global batches from `start_batch` on."""


TrainData = Dataset | StreamDataset  # rows to train on


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPoints:
    """Sync points of a run, which its ranks keep in the memory of their hosts.

    Attributes:
        every_n_steps: global steps from one point to the next.
        name: name of the memory; it differs for another plan or arrangement of ranks.
        not_before: a point of an earlier step is passed over, since a checkpoint is newer.
    """

    every_n_steps: int
    name: str
    not_before: int = 0


@dataclass(frozen=True, kw_only=True)
class RunOptions(ExchangeOptions):
    """Options of a user's run that every rank receives unchanged; without plan, data and model.

    Attributes:
        global_batch_size: rows of one step over all ranks; the ranks share it evenly.
        seed: seed of initial values and of the order of the data; from 0 to 2**63 - 1.
        sparse_optimizer: optimizer of the tables: a value of `rayrec.optim`, or one of those by
            name. A name alone, such as "adam", has the learning rate of the default.
        dense_optimizer: optimizer of all other parameters, likewise by name.
        checkpoint: schedule, kind and retention of checkpoints.
        new_data: continue with the weights, optimizers and step of `resume_from`, and begin the
            data anew: `data`, `global_batch_size` and `seed` may then differ from those that the
            checkpoint was trained with.
        init_from: checkpoint directory of another run whose weights this run starts with, at step
            0; tables and dense layers must have its names and sizes, all else may differ.
        init_optimizer_state: take the optimizers' state of `init_from`, too; the optimizers must
            then be the same.
        report_every_s: seconds between reports, about; also how soon a stop takes effect.
        shuffle, drop_last: shuffle the data, and leave out a last partial batch.
        extras: JSON data that every checkpoint of the run carries (what is needed to build the
            model again).
        tasks: prediction tasks of the model; none means one task with labels 0 and 1.
        evaluation: scores during training, keeping the best, and early stopping; None scores after
            training alone.
        sparse_schedule, dense_schedule: the learning rates of the tables and of all other
            parameters over the steps: a `ScheduleConfig`, or stages such as those of
            `rayrec.optim.schedule`; none keeps them.
        table_optimizers: table -> its own optimizer, in place of `sparse_optimizer`.
        clip_norm: the dense gradients are scaled down to at most this joint 2-norm.
        clip_value: each element of the dense gradients is clamped to +- this.
        accumulate: steps per update of the dense parameters, see
            `rayrec.train.PipelineOptions`; checkpoints and evaluations lie at multiples of it.
        dense_dtype: dtype of the dense layers' matrix products, in training and scoring.
        sharding_group_size: every table is sharded inside groups of so many ranks, and the groups
            are replicas of each other (2D parallelism); None makes one group of all ranks. The plan
            is for one group. Every group scores with its own replica.
        sync_every: steps between two averages of the replicas; 1 keeps them equal, and trains as
            one group would. A checkpoint averages them, too.
        rank_callbacks: called on every rank in its training thread; each rank has its own copies.
        publish: options of the publications for servers; None publishes nothing.
    """

    global_batch_size: int
    seed: int = 0
    sparse_optimizer: SparseOptimizer | OptimizerConfig = DEFAULT_SPARSE
    dense_optimizer: OptimizerConfig = DEFAULT_DENSE
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    new_data: bool = False
    init_from: str | None = None
    init_optimizer_state: bool = False
    report_every_s: float = 2.0
    shuffle: bool = True
    drop_last: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[Task, ...] = ()
    evaluation: EvaluationConfig | None = None
    sparse_schedule: Schedule = ()
    dense_schedule: Schedule = ()
    table_optimizers: Mapping[str, SparseOptimizer | OptimizerConfig] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    dense_dtype: Literal["float32", "bfloat16"] = "float32"
    sharding_group_size: int | None = None
    sync_every: int = 1
    rank_callbacks: tuple[Callback, ...] = ()
    publish: PublishConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = type(self).__name__
        self._check_shape(own)
        whole_number(f"{own} has global_batch_size", self.global_batch_size)
        seed_number(f"{own} has seed", self.seed)
        seconds(f"{own} has report_every_s", self.report_every_s)
        self.dense_optimizer.check_dense()
        _ = self.tables_optimizer, self.own_optimizers  # checks

    def _check_shape(self, own: str) -> None:
        """Check what shapes the loop: schedules, clipping, accumulation, types, callbacks."""
        for said in (self.sparse_schedule, self.dense_schedule):
            if not isinstance(said, ScheduleConfig):  # its stages follow from the run's steps
                check_stages(said)
        for what in ("clip_norm", "clip_value"):
            if getattr(self, what) is not None:
                positive(f"{own} has {what}", getattr(self, what))
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                f"{own} has clip_norm={self.clip_norm} and clip_value={self.clip_value}; give one."
            )
        whole_number(f"{own} has accumulate", self.accumulate)
        whole_number(f"{own} has sync_every", self.sync_every)
        if self.sharding_group_size is not None:
            whole_number(f"{own} has sharding_group_size", self.sharding_group_size)
        elif self.sync_every > 1:
            raise ConfigError(
                f"{own} has sync_every={self.sync_every} and no sharding_group_size: without "
                "groups there are no replicas to average."
            )
        for one in (self.checkpoint, self.evaluation, self.publish):
            every, config = one.every if one is not None else Every(), type(one).__name__
            if self.accumulate > 1 and every.n_rows is not None:
                raise ConfigError(
                    f"{config} has every_n_rows={every.n_rows} and {own} has "
                    f"accumulate={self.accumulate}: rows may end between two updates. Give "
                    "every_n_steps."
                )
            if every.n_steps is not None and every.n_steps % self.accumulate:
                raise ConfigError(
                    f"{config}(every_n_steps={every.n_steps}) is no multiple of accumulate="
                    f"{self.accumulate}: between two updates the dense layers have half-summed "
                    "gradients, which no checkpoint holds. Give a multiple."
                )

    @property
    def tables_optimizer(self) -> SparseOptimizer:
        """`sparse_optimizer` in the form that the lookup kernels take.

        Raises:
            ConfigError: its name, or an option of it, is unknown or out of range.
        """
        return as_optimizer(self.sparse_optimizer)

    @property
    def own_optimizers(self) -> dict[str, SparseOptimizer]:
        """`table_optimizers` in the form that the lookup kernels take."""
        return {table: as_optimizer(said) for table, said in self.table_optimizers.items()}

    def optimizers_of(
        self, tables: Sequence[BaseEmbeddingConfig]
    ) -> SparseOptimizer | dict[str, SparseOptimizer]:
        """Return the optimizer of all tables, or one per table where some have their own.

        Raises:
            ConfigError: an optimizer is given for a table that the model does not have.
        """
        own = self.own_optimizers
        if not own:
            return self.tables_optimizer
        names = {table.name for table in tables}
        unknown = sorted(set(own) - names)
        if unknown:
            raise ConfigError(
                f"table_optimizers names the table {unknown[0]!r}; the model's tables are "
                f"{', '.join(sorted(names))}."
            )
        return {name: own.get(name, self.tables_optimizer) for name in names}

    def shared(self) -> dict[str, Any]:
        """Return these options by name."""
        return {f.name: getattr(self, f.name) for f in fields(RunOptions)}


@dataclass(frozen=True, kw_only=True)
class TrainSpec(RunOptions):
    """One run of training or evaluation, the same on every rank.

    Attributes:
        model: () -> module whose forward takes a batch and returns (loss, (loss, logits, labels)),
            as `rayrec.models.DLRMTrain`; its tables may lie on the meta device. `loss` is the mean
            over the rows of the batch.
        data: rows to train on; None when the run only evaluates.
        plan: sharding plan, made for exactly the ranks of the run.
        steps: global steps until the run ends, counted from the first step of the model's life (a
            resumed run does the rest).
        eval_data: rows to score, or None.
        run_path: absolute folder or URI that receives step directories, or None (then nothing is
            saved).
        resume_from: checkpoint directories to continue from, the wanted one first; a later one is
            used only where those before it turn out to be damaged. Empty starts anew.
        profile: options of the profile, or None.
        run_began: step at which the run had first begun, in an attempt after a failure or a
            change; None in the first attempt.
        handed_over: the ranks hold the tables of the world before, and go on from them.
        sync_points: sets points in memory that a failed run goes on from, or None.
        mark: refuses saves once another world of ranks has followed, or None.
    """

    model: Callable[[], nn.Module]
    data: TrainData | None
    plan: ShardingPlan
    steps: int = 0
    eval_data: Dataset | None = None
    run_path: str | None = None
    resume_from: tuple[str, ...] = ()
    profile: ProfileConfig | None = None
    run_began: int | None = None
    handed_over: bool = False
    sync_points: SyncPoints | None = None
    mark: WorldMark | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("steps", self.steps, 0)
        for said in (self.sparse_schedule, self.dense_schedule):
            stages_of(said, self.steps)  # checks
        for one in (self.checkpoint, self.publish):
            if self.data is not None and one is not None and one.every_event_s is not None:
                self._check_events(f"{type(one).__name__} has every_event_s={one.every_event_s}")

    def _check_events(self, said: str) -> None:
        if not isinstance(self.data, StreamDataset):
            raise ConfigError(f"{said}, which counts the events of a stream; give every_n_steps.")
        if not (self.data.config.time or self.data.schema.time):
            raise ConfigError(
                f"{said}, and no column has the time of events; give data.stream.time."
            )
