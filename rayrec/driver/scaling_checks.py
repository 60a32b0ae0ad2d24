"""Checks of a run's options against the number and resources of its ranks, without a cluster."""

from __future__ import annotations

from rayrec.checks import whole_number
from rayrec.driver.config import RunConfig
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError
from rayrec.layout import KINDS, ShardingPlan


def check_run(run: RunConfig, scaling: ScalingConfig) -> None:
    """Check the options of a training against those of its ranks, before anything is started.

    Raises:
        ConfigError: the run is to recover where no process can be replaced or nothing be undone; or
            it could not save when its number of ranks changes; or the one rank is this very
            process, and an option is about the processes of ranks.
    """
    _check_recovery(run, scaling)
    _check_pauses(run, scaling)
    if scaling.num_workers:
        return
    for what in ("heartbeat_timeout_s", "setup_timeout_s", "stop_timeout_s"):
        value = getattr(run, what)
        if value != RunConfig.__dataclass_fields__[what].default:
            raise ConfigError(
                f"RunConfig has {what}={value:g}, which bounds the processes of ranks, and "
                "num_workers=0 runs the one rank in this process; leave it out, or give "
                "num_workers."
            )


def _check_recovery(run: RunConfig, scaling: ScalingConfig) -> None:
    """Refuse recovery where no process can be replaced, or nothing can be undone."""
    points = run.failure.sync_every_n_steps
    if points is not None and scaling.use_gpu:
        raise ConfigError(
            f"FailureConfig has sync_every_n_steps={points}, which keeps rows in the memory of "
            "hosts, and use_gpu=True keeps them on GPUs; leave it out and save more often."
        )
    if scaling.spares and not run.failure.max_failures:
        raise ConfigError(
            f"ScalingConfig has spares={scaling.spares} and FailureConfig has max_failures=0: a "
            "run that recovers from nothing needs no spares. Give max_failures, "
            "or leave spares out."
        )
    if run.failure.max_failures and not scaling.num_workers:
        raise ConfigError(
            f"FailureConfig has max_failures={run.failure.max_failures}, and num_workers=0 runs "
            "the one rank in this process, which cannot be replaced; leave it out, or give "
            "num_workers."
        )


def check_sizes(plan: str | ShardingPlan, run: RunConfig, scaling: ScalingConfig) -> None:
    """Check that what a user says fits every number of ranks that a run may have.

    Raises:
        ConfigError: a plan is for one number of ranks; or groups of ranks do not part all of them.
    """
    if not scaling.is_elastic:
        return
    words = f"num_workers={scaling.num_workers}"
    if isinstance(plan, ShardingPlan) or (plan != "auto" and plan not in KINDS):
        raise ConfigError(
            f"a plan is for one number of ranks, and {words} lets the run change it; give "
            "plan='auto' or a sharding kind, so that every number gets its own plan, or one number "
            "of ranks."
        )
    group = run.sharding_group_size
    for ranks in range(scaling.least, scaling.most + 1):
        if group is not None and (ranks % group or ranks == group):
            raise ConfigError(
                f"sharding_group_size={group} does not part {ranks} ranks into two or more equal "
                f"groups, and {words} lets the run have so many; leave it out, or give one number "
                "of ranks."
            )


def _check_pauses(run: RunConfig, scaling: ScalingConfig) -> None:
    """Refuse a training that could not save when its number of ranks changes."""
    if not scaling.is_elastic:
        return
    words = (
        f"num_workers={scaling.num_workers} lets the number of ranks change, which goes through a "
        "checkpoint where ranks are lost or leave a node"
    )
    if run.storage_path is None:
        raise ConfigError(f"{words}; give RunConfig(storage_path=...), or one number of ranks.")
    if not run.checkpoint.at_end:
        raise ConfigError(
            f"{words}, and CheckpointConfig(at_end=False) saves none when ranks pause; leave it "
            "out, or give one number of ranks."
        )


def check_resize(ranks: int, run: RunConfig, scaling: ScalingConfig) -> None:
    """Check that a run may go on with so many ranks.

    Raises:
        ConfigError: it may not; says between which numbers it may.
    """
    whole_number("Driver.resize(num_workers)", ranks)
    if not scaling.is_elastic:
        raise ConfigError(
            f"Driver.resize({ranks}): this driver has num_workers={scaling.num_workers}; give "
            "ScalingConfig(num_workers=(least, most)) to change it during a run."
        )
    _check_pauses(run, scaling)
    if not scaling.least <= ranks <= scaling.most:
        raise ConfigError(
            f"Driver.resize({ranks}) is outside of num_workers={scaling.num_workers}; give a "
            f"number from {scaling.least} to {scaling.most}."
        )
