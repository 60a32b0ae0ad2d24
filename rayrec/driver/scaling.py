"""`ScalingConfig`: number, resources and placement of a run's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rayrec.checks import positive, seconds, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

PLACEMENT_TIMEOUT_S = 120.0
SHRINK_AFTER_S = 30.0
GROW_AFTER_S = 30.0
LEAST_CPUS = 0.0001  # Ray counts resources in steps of it
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """Number, resources and placement of the ranks.

    Attributes:
        num_workers: ranks; each is one Ray actor. 0 is one rank in this very process, without Ray,
            for small runs and debuggers. (least, most) lets a run change its number of ranks: it
            starts with as many as there is room for, asks the cluster for the rest, and grows and
            shrinks between the two; see docs/resilience.md. (n, n) is n.
        use_gpu: one GPU per rank and NCCL between them; otherwise CPU and gloo.
        cpus_per_worker: CPUs that Ray reserves for a rank; also its number of threads (at least
            one). May be a fraction, to put more ranks on a small machine than it has cores.
        resources_per_worker: further Ray resources of each rank, by name.
        placement_strategy: Ray's strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        placement_timeout_s: longest wait for the cluster to provide the ranks. None waits
            `PLACEMENT_TIMEOUT_S` where that can help: other work holds the resources, or the
            cluster grows by itself. A number waits so long in any case, also for nodes that are
            added by hand.
        pin_cores: pin every rank to cores of its own, cpus_per_worker of them, by the machine's
            topology; all threads of a rank share them, also those that read data. For CPU ranks on
            Linux machines that run nothing else.
        memory_per_worker: bytes that a rank's tables, optimizer state and buffers may take; None
            derives it from the nodes.
        shrink_after_s: with (least, most), seconds that a run with a lost rank waits for another
            place before it goes on with fewer. None waits `SHRINK_AFTER_S`, and not at all on a
            cluster that cannot have the room: one that does not grow by itself.
        grow_after_s: with (least, most), seconds between two looks for room for more ranks, and
            the shortest time from one change to the next growth.
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
        check_fields(self)
        if isinstance(self.num_workers, tuple):
            self._check_range(*self.num_workers)
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
                f"use_gpu={self.use_gpu} and cpus_per_worker={self.cpus_per_worker}; leave "
                "pin_cores out, or give every rank a whole number of CPUs and no GPU."
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

    def _check_range(self, least: int, most: int) -> None:
        """Refuse what is no (least, most), and make one number of two equal ones."""
        if not 1 <= least <= most:
            raise ConfigError(
                f"ScalingConfig has num_workers={(least, most)}; it must be a whole number, or "
                "(least, most) with 1 <= least <= most."
            )
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
                    "spares keep up one number of ranks, and this run goes on with "
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
                f"cpus_per_worker={self.cpus_per_worker:g}; Ray reserves fractions from "
                f"{LEAST_CPUS} to 1 and whole numbers above that."
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
                "num_workers=0 runs one rank in this process. Leave it out, or give num_workers."
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
        """True if a run may change its number of ranks."""
        return self.least < self.most

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Kind of device that a rank computes on."""
        return "cuda" if self.use_gpu else "cpu"

    @property
    def threads(self) -> int:
        """CPU threads of a rank."""
        return max(1, int(self.cpus_per_worker))

    @property
    def bundle(self) -> dict[str, float]:
        """Ray resources of one rank."""
        gpu = {"GPU": 1.0} if self.use_gpu else {}
        return {"CPU": float(self.cpus_per_worker), **gpu, **(self.resources_per_worker or {})}
