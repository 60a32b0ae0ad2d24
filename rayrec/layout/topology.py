"""The machine a plan is made for: ranks by host, memory per rank and a few bandwidths.

A `Topology` is plain data. The driver fills it with what the cluster really has; `Topology.local`
makes one for the ranks of one host. Bandwidths are per rank and in bytes per second; the defaults
are orders of magnitude for prices, not promises: a calibration replaces them
(`rayrec.calibration`). Leaves out: links shared by several ranks, ranks of unequal speed.
Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, get_args

from rayrec.errors import ConfigError, PlanError
from rayrec.fields.json_text import json_object, of_json
from rayrec.fields.kinds import STATED
from rayrec.fields.writing import record_of
from rayrec.layout.rates import Rates
from rayrec.layout.words import also_takes

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Default speeds of a kind of device; every figure is per rank."""

    memory_bw: float
    intra_host_bw: float
    inter_host_bw: float
    latency_s: float


DEFAULT_SPEEDS: dict[str, Speeds] = {
    # one core: random gather of 256 to 512 byte rows; gloo between two processes; a 10 Gbit network
    "cpu": Speeds(memory_bw=12e9, intra_host_bw=2.5e9, inter_host_bw=1.0e9, latency_s=150e-6),
    # one data-centre GPU: random rows reach half of the streaming rate; NVLink; one 200 Gbit port
    "cuda": Speeds(memory_bw=1.5e12, intra_host_bw=200e9, inter_host_bw=20e9, latency_s=25e-6),
}

HBM_BYTES = 32 << 30  # memory of a GPU where TorchRec's words give none, as in TorchRec


def _from_torchrec(words: dict[str, Any]) -> dict[str, Any]:
    """`world_size`, `compute_device`, `local_world_size`, `hbm_cap` and `ddr_cap` as fields."""
    if "world_size" not in words:
        return words
    size, device = words.pop("world_size"), words.pop("compute_device", "cpu")
    near = words.pop("local_world_size", None) or size
    for word, value in (("world_size", size), ("local_world_size", near)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{word}={value!r}; it must be a whole number above 0.")
    ranks = range(size)
    caps = {"cuda": words.pop("hbm_cap", None) or HBM_BYTES, "cpu": words.pop("ddr_cap", None)}
    memory = caps.get(device) or Topology.local(near).memory_bytes[0]
    return {
        "hosts": tuple(tuple(ranks[i : i + near]) for i in ranks[::near]),
        "device": device,
        "memory_bytes": (memory,) * len(ranks),
        **asdict(DEFAULT_SPEEDS.get(device, DEFAULT_SPEEDS["cpu"])),
        # bytes per millisecond there
        **{
            word: 1000 * value if word.endswith("host_bw") else value
            for word, value in words.items()
        },
    }


@also_takes(_from_torchrec)
@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks by host and what each rank has.

    TorchRec's `Topology(world_size=, compute_device=, local_world_size=, hbm_cap=, ddr_cap=)` makes
    one as well.

    Attributes:
        hosts: ranks of each host; joined they are 0 .. world_size - 1 in order.
        device: "cpu" or "cuda", on which a rank computes.
        memory_bytes: per rank, the memory that tables, optimizer state and exchange buffers may
            take.
        memory_bw: bytes/s of random-row access of one rank.
        intra_host_bw, inter_host_bw: bytes/s that one rank exchanges with ranks of its host, and of
            other hosts.
        latency_s: fixed time of one collective.
        rates: further costs of a rank, by part of a step.
        input_hidden: share of the input part of a step, from 0 to 1, that a pipelined trainer does
            beside the step before.
    Raises:
        ConfigError: the ranks are not 0 .. world_size - 1 in order, or a number is not positive.
    """

    hosts: tuple[tuple[int, ...], ...]
    device: Device = field(default="cpu", metadata=STATED)
    memory_bytes: tuple[int, ...]
    memory_bw: float = field(default=DEFAULT_SPEEDS["cpu"].memory_bw, metadata=STATED)
    intra_host_bw: float = field(default=DEFAULT_SPEEDS["cpu"].intra_host_bw, metadata=STATED)
    inter_host_bw: float = field(default=DEFAULT_SPEEDS["cpu"].inter_host_bw, metadata=STATED)
    latency_s: float = field(default=DEFAULT_SPEEDS["cpu"].latency_s, metadata=STATED)
    rates: Rates = field(default_factory=Rates)
    input_hidden: float = 0.0

    def __post_init__(self) -> None:
        check_hosts(self.hosts)
        if self.device not in get_args(Device):
            raise ConfigError(
                f"device={self.device!r} is unknown; use one of {', '.join(get_args(Device))}."
            )
        if len(self.memory_bytes) != self.world_size:
            raise ConfigError(
                f"memory_bytes names {len(self.memory_bytes)} ranks, hosts name {self.world_size}."
            )
        for limit in self.memory_bytes:
            # a nan fails this comparison, too
            if not isinstance(limit, Real) or not limit >= 0:
                raise ConfigError(
                    f"memory_bytes has {limit!r}, negative or no number; give bytes, such as 2**34."
                )
        for name in ("memory_bw", "intra_host_bw", "inter_host_bw", "latency_s"):
            value = getattr(self, name)
            # Prices divide by bandwidths, so none may be 0; a latency of 0 only leaves a term out.
            if not 0 <= value < float("inf") or (value == 0 and name != "latency_s"):
                raise ConfigError(f"{name}={value} must be a positive, finite number.")
        if not 0 <= self.input_hidden <= 1:
            raise ConfigError(
                f"input_hidden={self.input_hidden} must be a share, from 0 (nothing is hidden) to "
                "1."
            )

    @classmethod
    def uniform(
        cls,
        num_hosts: int,
        ranks_per_host: int,
        memory_bytes: int,
        device: Device = "cpu",
        **speeds: float,
    ) -> Topology:
        """Equal hosts with equal ranks.

        Args:
            memory_bytes: limit of each rank.
            speeds: any of memory_bw, intra_host_bw, inter_host_bw, latency_s; the rest are the
                device's defaults.
        Raises:
            ConfigError: the class refuses the numbers, or there are no hosts or ranks.
        """
        if not all(isinstance(one, Integral) and one > 0 for one in (num_hosts, ranks_per_host)):
            raise ConfigError(
                "a topology needs whole numbers of hosts and ranks, at least 1 of each, got "
                f"{num_hosts!r} hosts of {ranks_per_host!r} ranks."
            )
        # the class refuses a device that is not known
        usual = DEFAULT_SPEEDS.get(device, DEFAULT_SPEEDS["cpu"])
        firsts = range(0, num_hosts * ranks_per_host, ranks_per_host)
        return cls(
            hosts=tuple(tuple(range(first, first + ranks_per_host)) for first in firsts),
            device=device,
            memory_bytes=(memory_bytes,) * (num_hosts * ranks_per_host),
            **(asdict(usual) | speeds),
        )

    @classmethod
    def local(
        cls,
        num_ranks: int,
        memory_bytes: int | None = None,
        device: Device = "cpu",
        **speeds: float,
    ) -> Topology:
        """One host with `num_ranks` ranks.

        Args:
            memory_bytes: limit of each rank; None on CPU means an even share of half of this
                machine's memory.
        Raises:
            ConfigError: the class refuses the numbers, or memory_bytes is missing for a GPU.
        """
        if memory_bytes is None:
            if device != "cpu":
                raise ConfigError(
                    "Topology.local needs memory_bytes for a GPU: what one rank's tables and "
                    "buffers may take."
                )
            # The other half is left to the dense model, the data and the system.
            machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            # `uniform` refuses what is no number of ranks
            memory_bytes = machine // 2 // cls.uniform(1, num_ranks, 0).world_size
        return cls.uniform(1, num_ranks, memory_bytes, device, **speeds)

    def with_speeds_of(self, other: Topology) -> Topology:
        """These ranks and their memory, with the bandwidths, latency and rates of `other`."""
        return replace(other, hosts=self.hosts, memory_bytes=self.memory_bytes, device=self.device)

    def group(self, size: int) -> Topology:
        """The first of equal groups of `size` ranks, which share tables among themselves.

        Raises:
            ConfigError: the ranks do not part into two or more groups, or the groups' hosts differ.
        """
        if size < 1 or self.world_size % size or size == self.world_size:
            raise ConfigError(
                f"sharding_group_size={size} does not part {self.world_size} ranks into two or "
                "more equal groups; choose a proper divisor, or leave it out."
            )
        shapes, memory = [], [self.memory_bytes[i::size] for i in range(size)]
        for first in range(0, self.world_size, size):
            hosts = [[r - first for r in host if first <= r < first + size] for host in self.hosts]
            shapes.append(tuple(tuple(host) for host in hosts if host))
        odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is not None:
            raise ConfigError(
                f"sharding_group_size={size}: the first group lies on hosts as {shapes[0]}, group "
                f"{odd} as {shapes[odd]}, and one plan holds for all. Choose a size that the "
                "ranks of a host divide, or that divides them."
            )
        return replace(self, hosts=shapes[0], memory_bytes=tuple(min(m) for m in memory))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(host) for host in self.hosts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(range(self.world_size))

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """Index of the host of each rank."""
        return tuple(i for i, host in enumerate(self.hosts) for _ in host)

    def to_json(self) -> str:
        """One JSON object as text."""
        return json.dumps(record_of(self))

    @classmethod
    def from_json(cls, text: str, source: str = "topology") -> Topology:
        """Read what `to_json` wrote.

        Raises:
            PlanError: names `source` and the field that is missing, of another type or contradicts
                the others.
        """
        return of_json(cls, json_object(text, source, PlanError), source, PlanError)


def check_hosts(hosts: Sequence[Sequence[int]]) -> None:
    """Check that hosts are not empty and their ranks joined are 0 .. world_size - 1 in order.

    Raises:
        ConfigError: they are not.
    """
    joined = [rank for host in hosts for rank in host]
    if not joined or not all(hosts) or joined != list(range(len(joined))):
        raise ConfigError(
            f"hosts={tuple(map(tuple, hosts))} must hold the ranks 0, 1, 2 ... in order, at least "
            "one per host."
        )
