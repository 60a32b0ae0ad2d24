"""`ScalingConfig` from the options of a command: `--ranks`, `--local`, `--gpu` and their kin."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rayrec.errors import ConfigError

if TYPE_CHECKING:
    from rayrec.driver import ScalingConfig


def default_ranks() -> int:
    """Return the number of ranks of a command where --ranks is not given."""
    # Two ranks show that sharding works, and fit a laptop.
    return min(2, os.cpu_count() or 1)


def number_of_ranks(
    ranks: int | tuple[int, int] | None, local: bool
) -> int | tuple[int, int] | None:
    """Return what one of --ranks and --local says as `num_workers`, or None without both."""
    if local and ranks is not None:
        raise ConfigError(
            "--ranks is about the ranks of a cluster, and --local runs one rank in this process. "
            "Leave one of them out."
        )
    return 0 if local else ranks


def scaling_from(
    *,
    ranks: int | None,
    local: bool,
    gpu: bool,
    cpus_per_rank: float,
    pin_cores: bool,
    placement_timeout: float | None,
) -> ScalingConfig:
    """Return the scaling config for the options of the same names, which may not contradict."""
    from rayrec.driver import ScalingConfig

    number = number_of_ranks(ranks, local)
    return ScalingConfig(
        num_workers=default_ranks() if number is None else number,
        use_gpu=gpu,
        cpus_per_worker=cpus_per_rank,
        placement_timeout_s=placement_timeout,
        pin_cores=pin_cores,
    )
