"""What a user says about a run: `ScalingConfig`, `RunConfig`, `FailureConfig`.

Names follow Ray Train where it has them. Every option is checked when the object is made, so that a
mistake costs no cluster start; what is not supported yet is refused and never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rayrec.checks import absolute_path, is_uri, lasting_path, positive, seconds, whole_number
from rayrec.errors import ConfigError
from rayrec.train.callbacks import Callback, check_callback
from rayrec.train.config import ProfileConfig, RunOptions

PLACEMENT_TIMEOUT_S = 120.0
SHRINK_AFTER_S = 30.0
GROW_AFTER_S = 30.0
LATEST = "latest"
AUTO = "auto"
LEAST_CPUS = 0.0001  # Ray counts resources in steps of it
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """How many ranks, and what each of them gets.

    Attributes:
        num_workers: ranks; each is one Ray actor. 0 is one rank in this very process, without Ray,
            for small runs and debuggers. (least, most) lets a run change its number of ranks: it
            starts with as many as there is room for, asks the cluster for the rest, and grows and
            shrinks between the two; see docs/resilience.md. (n, n) is n.
        use_gpu: one GPU per rank and NCCL between them; otherwise CPU and gloo.
        cpus_per_worker: CPUs that Ray reserves for a rank; also its number of threads (at least
            one). May be a fraction, to put more ranks on a small machine than it has cores.
        resources_per_worker: further Ray resources of each rank, by name.
        placement_strategy: of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        placement_timeout_s: how long to wait for the cluster to provide the ranks. None waits
            `PLACEMENT_TIMEOUT_S` where that can help: other work holds the resources, or the
            cluster grows by itself. A number waits so long in any case, also for nodes that are
            added by hand.
        pin_cores: pin every rank to cores of its own, cpus_per_worker of them, by the machine's
            topology; all threads of a rank share them, also those that read data. For CPU ranks on
            Linux machines that run nothing else.
        memory_per_worker: bytes that a rank's tables, optimizer state and buffers may take; None
            derives it from the nodes.
        shrink_after_s: with (least, most), how long a run that lost a rank waits for another place
            before it goes on with fewer ranks. None waits `SHRINK_AFTER_S`, and not at all on a
            cluster that cannot have the room: one that does not grow by itself.
        grow_after_s: with (least, most), how often a run looks whether there is room for more
            ranks, and the shortest time from one change to the next growth.
        spares: processes that wait beside the ranks, with torch imported, to take the place of a
            lost one; see docs/resilience.md. Each takes the resources of a rank. They come once the
            ranks train, and a run goes on without those that the cluster has no room for.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    cpus_per_worker: float = 1
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    placement_timeout_s: float | None = None
    memory_per_worker: int | None = None
    pin_cores: bool = False
    shrink_after_s: float | None = None
    grow_after_s: float = GROW_AFTER_S
    spares: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, tuple | list):
            self._check_range(self.num_workers)
        else:
            whole_number("ScalingConfig has num_workers", self.num_workers, 0)
        whole_number("ScalingConfig has spares", self.spares, 0)
        self._check_changes()
        positive("ScalingConfig has cpus_per_worker", self.cpus_per_worker)
        self._check_cpus()
        if self.placement_timeout_s is not None:
            seconds("ScalingConfig has placement_timeout_s", self.placement_timeout_s)
        if self.memory_per_worker is not None:
            whole_number("ScalingConfig has memory_per_worker", self.memory_per_worker)
        if self.pin_cores and (self.use_gpu or self.cpus_per_worker != int(self.cpus_per_worker)):
            raise ConfigError(
                "pin_cores gives CPU ranks whole cores, but this ScalingConfig has "
                f"use_gpu={self.use_gpu} and "
                f"cpus_per_worker={self.cpus_per_worker}; leave pin_cores out, or give every rank "
                "a whole number of CPUs and no GPU."
            )
        if self.placement_strategy not in STRATEGIES:
            raise ConfigError(
                f"placement_strategy {self.placement_strategy!r} is not known; "
                f"choose one of {', '.join(STRATEGIES)}."
            )
        for name, amount in (self.resources_per_worker or {}).items():
            if name in ("CPU", "GPU"):
                raise ConfigError(
                    f"resources_per_worker names {name}; say it with cpus_per_worker or use_gpu."
                )
            positive(f"ScalingConfig has resources_per_worker[{name!r}]", amount)

    def _check_range(self, given: Sequence[int]) -> None:
        """Refuse what is no (least, most), and make one number of two equal ones."""
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in given)
        if len(given) != 2 or not whole or not 1 <= given[0] <= given[1]:
            raise ConfigError(
                f"ScalingConfig has num_workers={tuple(given)!r}; it must be a whole number, or "
                "(least, most) with 1 <= least <= most."
            )
        least, most = given
        object.__setattr__(self, "num_workers", least if least == most else (least, most))

    def _check_changes(self) -> None:
        """Check what is about a number of ranks that may change."""
        seconds("ScalingConfig has grow_after_s", self.grow_after_s)
        if self.shrink_after_s is not None:
            seconds("ScalingConfig has shrink_after_s", self.shrink_after_s)
        if self.is_elastic:
            if self.placement_strategy != "PACK":
                raise ConfigError(
                    f"placement_strategy {self.placement_strategy!r} is about ranks that are "
                    f"placed together, and num_workers={self.num_workers} places them one by one; "
                    "use PACK, or one number of ranks."
                )
            if self.spares:
                raise ConfigError(
                    f"ScalingConfig has spares={self.spares} and num_workers={self.num_workers}: "
                    "spares (--spares) keep up one number of ranks, and this run goes on with "
                    "fewer. Give one number of ranks, or leave spares out."
                )
            return
        for name, default in (("shrink_after_s", None), ("grow_after_s", GROW_AFTER_S)):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is about a number of ranks that changes, and this ScalingConfig has "
                    f"num_workers={self.num_workers}; leave it out, or give num_workers=(least, "
                    "most)."
                )

    def _check_cpus(self) -> None:
        """Refuse amounts that Ray does not reserve, and options of a cluster if there is none."""
        whole = self.cpus_per_worker == int(self.cpus_per_worker)
        if self.cpus_per_worker < LEAST_CPUS or (self.cpus_per_worker > 1 and not whole):
            raise ConfigError(
                f"cpus_per_worker={self.cpus_per_worker:g} (--cpus-per-rank); Ray reserves "
                "fractions "
                f"from {LEAST_CPUS} to 1 and whole numbers above that."
            )
        if self.num_workers:
            return
        idle = [
            name
            for name in ("placement_timeout_s", "pin_cores", "resources_per_worker", "spares")
            if getattr(self, name)
        ]
        if idle or self.placement_strategy != "PACK":
            raise ConfigError(
                f"{(idle or ['placement_strategy'])[0]} is about ranks on a cluster, and "
                "num_workers=0 "
                "runs one rank in this process. Leave it out, or give num_workers."
            )

    @property
    def least(self) -> int:
        """The smallest number of ranks of a run."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most(self) -> int:
        """The largest number of ranks of a run."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def is_elastic(self) -> bool:
        """Whether a run may change its number of ranks."""
        return self.least < self.most

    @property
    def bundle(self) -> dict[str, float]:
        """Ray resources of one rank."""
        gpu = {"GPU": 1.0} if self.use_gpu else {}
        return {"CPU": float(self.cpus_per_worker), **gpu, **(self.resources_per_worker or {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig:
    """What to do when a rank fails.

    Attributes:
        max_failures: how many failures a run recovers from; the next one ends it with
            `TrainingFailed`. -1 sets no bound. A user's mistake, and the same error at the same
            step twice, end the run in any case.
        sync_every_n_steps: ranks on CPUs set a sync point after every so many global steps. A run
            that lost processes and no host goes on from the last one, out of memory; see
            docs/resilience.md. None sets none.
    """

    max_failures: int = 0
    sync_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        whole_number("FailureConfig has max_failures", self.max_failures, -1)
        if self.sync_every_n_steps is None:
            return
        whole_number("FailureConfig has sync_every_n_steps", self.sync_every_n_steps)
        if not self.max_failures:
            raise ConfigError(
                f"FailureConfig has sync_every_n_steps={self.sync_every_n_steps} and "
                "max_failures=0: a run that recovers from nothing needs no sync points. Give "
                "max_failures (--max-failures), or leave sync_every_n_steps (--sync-points) out."
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunOptions):
    """One run: how long, how large the steps, where it is kept. `RunOptions` has its other options.

    Attributes:
        steps, epochs: how long to train; give one of them.
        name: folder of the run below storage_path.
        storage_path: local folder or URI that receives checkpoints; None saves none. A relative
            path is taken from the working directory of the process that makes this config. All
            hosts of the ranks must see the folder, which is checked.
        failure: what to do when a rank fails.
        resume_from: checkpoint directory to continue from, or "latest" of the run's own folder, or
            "auto": the latest where there is one, else the run starts anew or from init_from. It
            may come from another number of ranks and another plan. Where it is not the newest of
            the run's folder, the later ones are set aside. "latest" takes the newest whole
            checkpoint and says so when it had to pass over a damaged one.
        timeout_s: bound on every collective; a rank that hangs in one is noticed after this time.
        heartbeat_timeout_s: a rank whose process says nothing for so long counts as lost.
        setup_timeout_s: bound on the start of the ranks.
        stop_timeout_s: how long a stop request may take, including the last checkpoint.
        progress: "auto" draws a live bar on a terminal and prints plain lines elsewhere; "plain"
            and "off" say so.
        profile: where to write a profile of some steps, see `ProfileConfig`; a relative path is
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
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        for callback in self.callbacks:
            check_callback("RunConfig has callbacks", callback)
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
        super().__post_init__()
        for what in ("storage_path", "resume_from", "init_from"):
            path = getattr(self, what)
            word = what == "resume_from" and path in (LATEST, AUTO)
            if path is not None and not word:
                make = lasting_path if what == "storage_path" else absolute_path
                object.__setattr__(self, what, make(f"RunConfig has {what}", path))
        if self.progress not in ("auto", "plain", "off"):
            raise ConfigError(
                f"RunConfig has progress={self.progress!r}; choose one of auto, plain, off."
            )
        self._check_start()
        if self.checkpoint.num_to_keep and not self.storage_path:
            raise ConfigError(
                f"CheckpointConfig(num_to_keep={self.checkpoint.num_to_keep}) keeps checkpoints of "
                "a run that has none; "
                "give RunConfig(storage_path=...)."
            )
        if self.evaluation is not None and self.evaluation.keep_best and not self.storage_path:
            raise ConfigError(
                "EvaluationConfig(keep_best=True) saves checkpoints; give "
                "RunConfig(storage_path=...), or leave keep_best out."
            )
        points = self.failure.sync_every_n_steps
        if points is not None and points % self.accumulate:
            raise ConfigError(
                f"FailureConfig(sync_every_n_steps={points}) (--sync-points) is no multiple of "
                f"accumulate={self.accumulate}: between two updates the dense layers have "
                "half-summed gradients, which no sync point holds. Give a multiple."
            )
        if self.checkpoint.every_n_steps and not self.storage_path:
            raise ConfigError(
                f"checkpoints every {self.checkpoint.every_n_steps} steps need "
                "RunConfig(storage_path=...)."
            )
        for what in ("every_s", "asynchronous", "incremental"):
            value = getattr(self.checkpoint, what)
            if value and not self.storage_path:
                raise ConfigError(
                    f"CheckpointConfig({what}={value}) says how a run saves that has no storage; "
                    "give RunConfig(storage_path=...)."
                )
        is_elsewhere = self.storage_path is None or is_uri(self.storage_path)
        if self.publish is not None and self.publish.path is None and is_elsewhere:
            raise ConfigError(
                f"RunConfig has publish=... and storage_path={self.storage_path!r}; publications "
                "lie in a local folder. Give PublishConfig(path=...)."
            )
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ConfigError(
                f"RunConfig has name={self.name!r}; it must be the name of one folder."
            )

    def _check_start(self) -> None:
        """Refuse contradictions between the options that say where a run starts."""
        if self.resume_from not in (None, AUTO) and self.init_from is not None:
            raise ConfigError(
                f"RunConfig has resume_from={self.resume_from!r} and init_from={self.init_from!r}; "
                "a run continues another "
                "or starts with its weights at step 0. Give one of them."
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
                "new_data=True is about the data of a resumed run; give "
                "resume_from=..., or leave it out."
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
