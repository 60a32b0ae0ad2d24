"""Options of a run: `RunConfig` and `FailureConfig`; the number of ranks is in `scaling`.

Names follow Ray Train where it has them. Every option is checked when the object is made, so that a
mistake costs no cluster start; what is not supported yet is refused and never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rayrec.checkpoint import checkpoint_path
from rayrec.checks import is_uri, lasting_path, seconds, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.train.callbacks import Callback
from rayrec.train.config import RunOptions
from rayrec.train.profile_config import ProfileConfig

LATEST = "latest"
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig:
    """Options for recovery from failed ranks.

    Attributes:
        max_failures: number of failures that a run recovers from; the next one ends it with
            `TrainingFailed`. -1 sets no bound. A user's mistake, and the same error at the same
            step twice, end the run in any case.
        max_preemptions: the same bound for ranks that were lost with nodes that were announced to
            go, which do not count as failures. A run with max_failures=0 recovers from none.
        sync_every_n_steps: ranks on CPUs set a sync point after every so many global steps. A run
            that lost processes and no host goes on from the last one, out of memory; see
            docs/resilience.md. None sets none.
        log_decisions: write what the driver sees and decides into the folder logs of the run, where
            `rayrec report` finds it; about two kilobytes a second for each rank.
    """

    max_failures: int = 0
    max_preemptions: int = -1
    sync_every_n_steps: int | None = None
    log_decisions: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("FailureConfig has max_failures", self.max_failures, -1)
        whole_number("FailureConfig has max_preemptions", self.max_preemptions, -1)
        if self.sync_every_n_steps is None:
            return
        whole_number("FailureConfig has sync_every_n_steps", self.sync_every_n_steps)
        if not self.max_failures:
            raise ConfigError(
                f"FailureConfig has sync_every_n_steps={self.sync_every_n_steps} and "
                "max_failures=0: a run that recovers from nothing needs no sync points. Give "
                "max_failures, or leave sync_every_n_steps out."
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """One run: how long, how large the steps, where it is kept. `RunOptions` has its other options.

    Attributes:
        steps, epochs: length of the training; give one of them.
        name: folder of the run below storage_path.
        storage_path: local folder or URI that receives checkpoints; None saves none. A relative
            path is taken from the working directory of the process that makes this config. All
            hosts of the ranks must see the folder, which is checked.
        failure: options for recovery from failed ranks.
        resume_from: checkpoint directory to continue from, or the folder of a run with @latest or
            @best behind it, as everywhere, or "latest" of the run's own folder, or "auto": the
            latest where there is one, else the run starts anew or from init_from. It may come from
            another number of ranks and another plan. Where it is not the newest of the run's
            folder, the later ones are set aside. "latest" takes the newest whole checkpoint and
            says so when it had to pass over a damaged one.
        timeout_s: bound on every collective; a rank that hangs in one is noticed after this time.
        heartbeat_timeout_s: a rank whose process says nothing for so long counts as lost.
        setup_timeout_s: bound on the start of the ranks.
        stop_timeout_s: bound on a stop from request to end, the last checkpoint included. The three
            are refused with num_workers=0, which has no processes of ranks.
        progress: "auto" draws a live bar on a terminal and prints plain lines elsewhere; "plain"
            and "off" say so.
        profile: folder and steps of a profile, see `ProfileConfig`; a relative path is
            taken from the driver's folder.
        callbacks: called in the driver's process, see `rayrec.Callback`.
    """

    steps: int | None = None
    epochs: int | None = None
    name: str = "run"
    storage_path: str | None = None
    failure: FailureConfig = field(default_factory=FailureConfig)
    resume_from: str | None = None
    timeout_s: float = 300.0
    heartbeat_timeout_s: float = 30.0
    setup_timeout_s: float = 120.0
    stop_timeout_s: float = 60.0
    progress: Literal["auto", "plain", "off"] = "auto"
    profile: ProfileConfig | None = None
    callbacks: tuple[Callback, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"RunConfig has steps={self.steps} and epochs={self.epochs}; give "
                "exactly one of them."
            )
        for what in ("steps", "epochs"):
            value = getattr(self, what)
            if value is not None:
                whole_number(f"RunConfig has {what}", value)
        for what in ("timeout_s", "heartbeat_timeout_s", "setup_timeout_s", "stop_timeout_s"):
            seconds(f"RunConfig has {what}", getattr(self, what))
        if self.storage_path is not None:
            path = lasting_path("RunConfig has storage_path", self.storage_path)
            object.__setattr__(self, "storage_path", path)
        for what in ("resume_from", "init_from"):
            path = getattr(self, what)
            word = what == "resume_from" and path in (LATEST, AUTO)
            if path is not None and not word:
                object.__setattr__(self, what, checkpoint_path(f"RunConfig has {what}", path))
        self._check_start()
        if self.failure.log_decisions and is_uri(self.storage_path or "://"):
            raise ConfigError(
                f"FailureConfig(log_decisions=True) writes into the run's folder on this machine, "
                f"and storage_path={self.storage_path!r}; give a local folder."
            )
        if self.storage_path is None:
            self._check_nothing_kept()
        points = self.failure.sync_every_n_steps
        if points is not None and points % self.accumulate:
            raise ConfigError(
                f"FailureConfig(sync_every_n_steps={points}) is no multiple of "
                f"accumulate={self.accumulate}: between two updates the dense layers have "
                "half-summed gradients, which no sync point holds. Give a multiple."
            )
        is_elsewhere = self.storage_path is None or is_uri(self.storage_path)
        if self.publish is not None and self.publish.path is None and is_elsewhere:
            raise ConfigError(
                f"RunConfig has publish=... and storage_path={self.storage_path!r}; publications "
                "lie in a local folder. Give PublishConfig(path=...)."
            )
        if self.name in ("", ".", "..") or {"/", "\0"} & set(self.name):
            raise ConfigError(
                f"RunConfig has name={self.name!r}; it must be the name of one folder."
            )

    def _check_nothing_kept(self) -> None:
        """Refuse what says how a run saves that has no storage."""
        schedule = ("every_n_steps", "every_n_rows", "every_event_s", "every_s")
        for what in ("num_to_keep", *schedule, "asynchronous", "incremental"):
            if value := getattr(self.checkpoint, what):
                raise ConfigError(
                    f"CheckpointConfig({what}={value}) says how a run saves that has no storage; "
                    "give RunConfig(storage_path=...)."
                )
        if self.evaluation is not None and self.evaluation.keep_best:
            raise ConfigError(
                "EvaluationConfig(keep_best=True) saves checkpoints; give "
                "RunConfig(storage_path=...), or leave keep_best out."
            )

    def _check_start(self) -> None:
        """Refuse contradictions between the options that say where a run starts."""
        if self.resume_from not in (None, AUTO) and self.init_from is not None:
            raise ConfigError(
                f"RunConfig has resume_from={self.resume_from!r} and init_from={self.init_from!r}; "
                "a run continues another or starts with its weights at step 0. Give one of them."
            )
        if self.resume_from in (LATEST, AUTO) and self.storage_path is None:
            raise ConfigError(
                f"resume_from={self.resume_from!r} needs RunConfig(storage_path=...), to look for "
                "the newest checkpoint in."
            )
        if self.new_data and self.resume_from == AUTO:
            raise ConfigError(
                "new_data=True begins the data anew whenever a run is continued, and "
                "resume_from='auto' may continue it many times; name the checkpoint, or leave "
                "new_data out."
            )
        if self.new_data and self.resume_from is None:
            raise ConfigError(
                "new_data=True is about the data of a resumed run; give resume_from=..., or leave "
                "it out."
            )
        if self.init_optimizer_state and self.init_from is None:
            raise ConfigError(
                "init_optimizer_state=True takes the state of init_from; give "
                "init_from=..., or leave it out."
            )

    @property
    def run_path(self) -> str | None:
        """Absolute folder or URI of this run's checkpoints, or None."""
        return None if self.storage_path is None else f"{self.storage_path.rstrip('/')}/{self.name}"
