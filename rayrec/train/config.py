"""What one training run is, as plain data that every rank receives alike: `TrainSpec` and the small
options inside it.

The driver builds a `TrainSpec` from the user's RunConfig; a test or a notebook may build one by
hand and run a `RankTrainer` without Ray. Functions in it (model, data) travel by cloudpickle when
Ray carries it. The meaning of a run lies here and not in the number of ranks: steps are global
steps and batch sizes are rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rayrec.checks import absolute_path, is_uri, seed_number, whole_number
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan

if TYPE_CHECKING:
    from torch import nn

DENSE_OPTIMIZERS = ("adam", "adagrad", "sgd")
# those of rayrec.optim
SPARSE_OPTIMIZERS = (
    "rowwise_adagrad",
    "adagrad",
    "adam",
    "lamb",
    "lars_sgd",
    "partial_rowwise_adam",
    "sgd",
)

WIRE_PRECISIONS = ("fp32", "fp16", "bf16", "int8")  # those of rayrec.comm.codec


class Dataset(Protocol):
    """What training needs of a dataset; `rayrec.data.ParquetDataset` and `ArrowDataset` fit it."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """An optimizer by name with its learning rate.

    Attributes:
        name: of the dense part one of adam, adagrad, sgd; of the tables one of SPARSE_OPTIMIZERS.
        lr: learning rate, at least 0.
    """

    name: str
    lr: float

    def __post_init__(self) -> None:
        if not 0 <= self.lr < float("inf"):
            raise ConfigError(
                f"optimizer {self.name!r} has lr={self.lr}; it must be finite and not negative."
            )


DEFAULT_SPARSE = OptimizerConfig(name="rowwise_adagrad", lr=0.05)
DEFAULT_DENSE = OptimizerConfig(name="adam", lr=1e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and how much to keep; the names are Ray Train's where it has them.

    Attributes:
        every_n_steps: save after every so many global steps; None saves none on the way.
        num_to_keep: keep only so many newest checkpoints; None keeps all.
        at_end: save when the run ends, also when it was stopped; needs a storage_path.
    """

    every_n_steps: int | None = None
    num_to_keep: int | None = None
    at_end: bool = True

    def __post_init__(self) -> None:
        for what, value in (
            ("every_n_steps", self.every_n_steps),
            ("num_to_keep", self.num_to_keep),
        ):
            if value is not None:
                whole_number(f"CheckpointConfig has {what}", value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Where to write a profile of some steps, and of which.

    Attributes:
        path: folder of every rank's own host; traces of the ranks and rank 0's summary go there,
            over those of an earlier run. A relative path is taken from the working directory of the
            process that makes this config.
        skip_steps: steps of this run before it, of which the first are slow.
        steps: so many are timed by part, and then as many traced.
    """

    path: str
    skip_steps: int = 5
    steps: int = 10

    def __post_init__(self) -> None:
        if not self.path or is_uri(self.path):
            raise ConfigError(
                f"ProfileConfig has path={self.path!r}; it must be a folder of the "
                "ranks' own file system."
            )
        object.__setattr__(self, "path", absolute_path("ProfileConfig has path", self.path))
        for what, value in (("skip_steps", self.skip_steps), ("steps", self.steps)):
            whole_number(f"ProfileConfig has {what}", value)

    def check_steps(self, steps: int) -> None:
        """See that a run of so many steps is long enough.

        Raises:
            ConfigError: it is not.
        """
        if steps < self.skip_steps + 2 * self.steps:
            raise ConfigError(
                f"the run has {steps} steps, a profile takes {self.skip_steps + 2 * self.steps}: "
                f"it skips {self.skip_steps}, times "
                f"{self.steps} and traces {self.steps}. Run longer, or set "
                "ProfileConfig(skip_steps=..., steps=...)."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """One run of training or evaluation, the same on every rank.

    Attributes:
        model: () -> module whose forward takes a batch and returns (loss, (loss, logits, labels)),
            as `rayrec.models.DLRMTrain`; its tables may lie on the meta device. `loss` is the mean
            over the rows of the batch.
        data: what to train on; None when the run only evaluates.
        plan: where every table lies; made for exactly the ranks of the run.
        global_batch_size: rows of one step over all ranks.
        steps: global steps until the run ends, counted from the first step of the model's life (a
            resumed run does the rest).
        seed: of initial values and of the order of the data.
        resume_from: checkpoint directories to continue from, the wanted one first; a later one is
            used only where those before it turn out to be damaged. Empty starts anew.
        new_data: continue with the weights and the step of `resume_from`, and begin the data anew.
        init_from: checkpoint directory whose weights a new run starts with at step 0, or None.
        init_optimizer_state: take the optimizers' state of `init_from`, too.
        run_path: absolute folder or URI that receives step directories, or None (then nothing is
            saved).
        report_every_s: seconds between reports, about; also how soon a stop takes effect.
        qcomms_forward, qcomms_backward: precision of pooled rows and of their gradients between
            ranks, one of WIRE_PRECISIONS.
        share_tables: CPU ranks of one host read each other's rows in place where they can.
        profile: which steps to profile, or None.
        extras: JSON data that every checkpoint of the run carries (what is needed to build the
            model again).
    """

    model: Callable[[], nn.Module]
    data: Dataset | None
    plan: ShardingPlan
    global_batch_size: int
    steps: int = 0
    seed: int = 0
    eval_data: Dataset | None = None
    sparse_optimizer: OptimizerConfig = DEFAULT_SPARSE
    dense_optimizer: OptimizerConfig = DEFAULT_DENSE
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run_path: str | None = None
    resume_from: tuple[str, ...] = ()
    new_data: bool = False
    init_from: str | None = None
    init_optimizer_state: bool = False
    report_every_s: float = 2.0
    shuffle: bool = True
    drop_last: bool = False
    qcomms_forward: str = "fp32"
    qcomms_backward: str = "fp32"
    share_tables: bool = True
    profile: ProfileConfig | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole_number("global_batch_size", self.global_batch_size)
        whole_number("steps", self.steps, 0)
        seed_number("seed", self.seed)
        check_names(self)


class NamedChoices(Protocol):
    """What `RunConfig` and `TrainSpec` say by name."""

    @property
    def sparse_optimizer(self) -> OptimizerConfig:
        """The tables' optimizer."""

    @property
    def dense_optimizer(self) -> OptimizerConfig:
        """The optimizer of all other parameters."""

    @property
    def qcomms_forward(self) -> str:
        """The precision of pooled rows between ranks."""

    @property
    def qcomms_backward(self) -> str:
        """The precision of their gradients."""


def check_names(choices: NamedChoices) -> None:
    """Check optimizers and wire precisions that are said by name.

    Raises:
        ConfigError: a name is not known; lists those that are.
    """
    for what, name, known in (
        ("dense_optimizer", choices.dense_optimizer.name, DENSE_OPTIMIZERS),
        ("sparse_optimizer", choices.sparse_optimizer.name, SPARSE_OPTIMIZERS),
        ("qcomms_forward", choices.qcomms_forward, WIRE_PRECISIONS),
        ("qcomms_backward", choices.qcomms_backward, WIRE_PRECISIONS),
    ):
        if name not in known:
            raise ConfigError(f"{what} {name!r} is not known; choose one of {', '.join(known)}.")
