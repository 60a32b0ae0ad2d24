"""Topologies of known machines, by data sheets, for plans made before there is a cluster.

Bandwidths are per GPU. Random rows reach about half of the memory's streaming rate, links about 80%
of theirs; data sheets give NVLink as the sum of both directions. Sources: NVIDIA data sheets "A100
Tensor Core GPU" (2021, SXM), "H100 Tensor Core GPU" (2023, SXM), "H200 Tensor Core GPU" (2024,
SXM), "DGX B200" (2024); networks as in DGX A100 (one 200 Gbit/s InfiniBand port per GPU) and DGX
H100, H200, B200 (one 400 Gbit/s port per GPU). Nothing of the input is taken as hidden by a
pipelined trainer: that was not measured on a GPU, and hidden ids share the links with rows. A
calibration on the real machine is better than any of these. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.errors import ConfigError
from rayrec.layout.topology import DEFAULT_SPEEDS, Device, Topology

RANDOM_ROWS = 0.5  # of the streaming rate
LINK_USE = 0.8  # of a link's rate
RESERVE = 0.15  # of a rank's memory: the dense model, its optimizer, the allocator and the runtime
RANKS_PER_HOST = 8
MAX_RANKS = 16_384  # a plan for as many takes half a minute


@dataclass(frozen=True, slots=True)
class Preset:
    """One GPU of a host, in the data sheet's figures.

    Attributes:
        memory_gb: 10^9 bytes.
        memory_gb_s: streaming.
        nvlink_gb_s: both directions together. network_gb_s: one direction.
    """

    memory_gb: float
    memory_gb_s: float
    nvlink_gb_s: float
    network_gb_s: float


PRESETS = {
    "a100-40": Preset(40, 1555, 600, 25),
    "a100-80": Preset(80, 2039, 600, 25),
    "h100": Preset(80, 3350, 900, 50),
    "h200": Preset(141, 4800, 900, 50),
    "b200": Preset(180, 8000, 1800, 50),
}
CPU = "cpu"  # one core and 8 GB a rank, gloo


def preset_topology(
    name: str, ranks: int | None = None, hosts: int | None = None, reserve: float = RESERVE
) -> Topology:
    """The topology of `hosts` equal machines.

    Args:
        name: a key of PRESETS, or "cpu".
        ranks: number of ranks of all hosts together; 8 per host when not given.
        hosts: number of hosts; as few as 8 ranks per host need when not given.
        reserve: fraction of every rank's memory that tables may not take.
    Raises:
        ConfigError: an unknown name, ranks that do not divide evenly or are too many, or a fraction
            outside [0, 1).
    """
    if name != CPU and name not in PRESETS:
        raise ConfigError(
            f"topology {name!r} is neither a file nor a preset; the presets are "
            f"{', '.join([*PRESETS, CPU])}."
        )
    if not 0 <= reserve < 1:
        raise ConfigError(f"reserve={reserve} must be a fraction of the memory, from 0 to below 1.")
    if (ranks is not None and ranks < 1) or (hosts is not None and hosts < 1):
        raise ConfigError(
            f"a topology needs at least one rank and one host, got ranks={ranks}, hosts={hosts}."
        )
    if hosts is None:
        hosts = 1 if ranks is None else -(-ranks // RANKS_PER_HOST)
    ranks = hosts * RANKS_PER_HOST if ranks is None else ranks
    if ranks > MAX_RANKS:
        raise ConfigError(f"{ranks} ranks; plans are made for at most {MAX_RANKS}.")
    if ranks % hosts:
        raise ConfigError(
            f"{ranks} ranks do not divide evenly over {hosts} hosts; write a topology file for "
            "hosts of unequal size."
        )
    device: Device = "cpu" if name == CPU else "cuda"
    if name == CPU:
        memory_bytes, speeds = 8e9, {}
    else:
        gpu = PRESETS[name]
        memory_bytes = gpu.memory_gb * 1e9
        speeds = {
            "memory_bw": gpu.memory_gb_s * 1e9 * RANDOM_ROWS,
            "intra_host_bw": gpu.nvlink_gb_s / 2 * 1e9 * LINK_USE,
            "inter_host_bw": gpu.network_gb_s * 1e9 * LINK_USE,
            "latency_s": DEFAULT_SPEEDS["cuda"].latency_s,
        }
    return Topology.uniform(
        hosts, ranks // hosts, int(memory_bytes * (1 - reserve)), device, **speeds
    )
