"""Configs of the jobs from their options: `ScalingConfig` and `RunConfig`.

Every path is made absolute here, from the working directory of the job, because ranks run in other
directories.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.options import PROFILE_SKIP, PROFILE_STEPS
from rayrec.errors import ConfigError
from rayrec.runs.inputs import output_path, read_text, run_folder
from rayrec.runs.scaling import scaling_from
from rayrec.spec.schedule import Schedule, ScheduleConfig
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.optimizer_config import OptimizerConfig
from rayrec.train.profile_config import ProfileConfig
from rayrec.train.publish_config import PublishConfig

if TYPE_CHECKING:
    from rayrec.driver import RunConfig, ScalingConfig

__all__ = ["output_path", "read_text", "run_of", "scaling_of"]


def scaling_of(args: argparse.Namespace) -> ScalingConfig:
    """Return the scaling config for the options that `add_scaling_options` added.

    Raises:
        ConfigError: they contradict each other.
    """
    return scaling_from(
        ranks=args.ranks,
        # Jobs that need a cluster do not have the option.
        local=getattr(args, "local", False),
        gpu=args.gpu,
        cpus_per_rank=args.cpus_per_rank,
        pin_cores=args.pin_cores,
        placement_timeout=args.placement_timeout,
        # Jobs that do not train do not have the option.
        spares=getattr(args, "spares", 0),
    )


def run_of(
    args: argparse.Namespace, *, epochs: int, extras: Mapping[str, Any], drop_last: bool = False
) -> RunConfig:
    """Return the run config for the options of `add_training_options` and `add_keeping_options`.

    Args:
        epochs: number of epochs when neither --steps nor --epochs is given.
        extras: JSON data that every checkpoint carries.
        drop_last: leave out a last partial batch.
    Raises:
        ConfigError: they contradict each other.
    """
    from rayrec.driver import FailureConfig, RunConfig

    _check_together(args)
    storage, name = None, "run"
    if args.checkpoint_dir is not None:
        storage, name = run_folder(args.checkpoint_dir)
    return RunConfig(
        global_batch_size=args.global_batch_size,
        steps=args.steps,
        epochs=args.epochs if args.epochs is not None or args.steps is not None else epochs,
        name=name,
        storage_path=storage,
        seed=args.seed,
        sparse_optimizer=_optimizer(args.optimizer, args.sparse_lr, args.sparse),
        dense_optimizer=_optimizer(args.dense_optimizer, args.dense_lr, args.dense),
        sparse_schedule=_schedule(args),
        dense_schedule=_schedule(args),
        qcomms_forward=args.qcomms_forward,
        qcomms_backward=args.qcomms_backward,
        share_tables=args.share_tables,
        checkpoint=CheckpointConfig(
            every_n_steps=args.checkpoint_every,
            every_s=args.checkpoint_every_s,
            num_to_keep=args.keep,
            at_end=storage is not None,
            asynchronous=args.checkpoint_async,
            incremental=args.checkpoint_incremental,
            full_every=args.checkpoint_full_every,
        ),
        resume_from=args.resume,
        new_data=args.new_data,
        init_from=args.init_from,
        init_optimizer_state=args.init_optimizer,
        timeout_s=args.timeout,
        heartbeat_timeout_s=args.heartbeat_timeout,
        failure=FailureConfig(max_failures=args.max_failures, sync_every_n_steps=args.sync_points),
        drop_last=drop_last,
        profile=_profile(args),
        publish=_publish(args),
        extras=extras,
    )


def _optimizer(word: str, lr: float | None, base: OptimizerConfig) -> OptimizerConfig:
    named = OptimizerConfig.of_word(word, base)
    return named if lr is None else replace(named, lr=lr)


def _schedule(args: argparse.Namespace) -> Schedule:
    """Return the schedule of both learning rates for --schedule and --warmup."""
    if args.schedule == "constant" and not args.warmup:
        return ()
    return ScheduleConfig(decay=args.schedule, warmup=args.warmup)


def _profile(args: argparse.Namespace) -> ProfileConfig | None:
    if args.profile is None:
        return None
    return ProfileConfig(
        path=args.profile,
        skip_steps=args.profile_skip or PROFILE_SKIP,
        steps=args.profile_steps or PROFILE_STEPS,
    )


def _publish(args: argparse.Namespace) -> PublishConfig | None:
    """Return the publish config; None where no option asks for it, or the job has none."""
    if not _value(args, "--publish-every") and not _value(args, "--publish-every-s"):
        return None
    tables = args.publish_table or []
    names = [name for name, _ in tables]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--publish-table names {twice!r} twice; give it one type.")
    return PublishConfig(
        path=args.publish_dir,
        every_n_steps=args.publish_every,
        every_s=args.publish_every_s,
        dtype=args.publish_dtype or "int8",
        tables=dict(tables),
        full_every=args.publish_full_every,
        num_to_keep=args.publish_keep,
        signing_key=args.publish_signing_key,
    )


def _value(args: argparse.Namespace, option: str) -> Any:
    """Return the value of an option by its name; falsy where it is not given or not known here."""
    return getattr(args, option.removeprefix("--").replace("-", "_"), None)


def _check_together(args: argparse.Namespace) -> None:
    """Check that options of a run do not contradict each other, and that none is without effect.

    Raises:
        ConfigError: names two options.
    """
    for one, other in (
        ("--steps", "--epochs"),
        ("--resume", "--init-from"),
        ("--checkpoint-every", "--checkpoint-every-s"),
        ("--publish-every", "--publish-every-s"),
    ):
        # 'auto' starts with the weights of --init-from once, and then continues
        if one == "--resume" and args.resume == "auto":
            continue
        if _value(args, one) and _value(args, other):
            raise ConfigError(f"{one} contradicts {other}; give one of them.")
    for option, needed in (
        ("--checkpoint-every", "--checkpoint-dir"),
        ("--checkpoint-every-s", "--checkpoint-dir"),
        ("--checkpoint-async", "--checkpoint-dir"),
        ("--checkpoint-incremental", "--checkpoint-dir"),
        ("--checkpoint-full-every", "--checkpoint-incremental"),
        ("--keep", "--checkpoint-dir"),
        ("--spares", "--max-failures"),
        ("--new-data", "--resume"),
        ("--init-optimizer", "--init-from"),
        ("--profile-steps", "--profile"),
        ("--profile-skip", "--profile"),
    ):
        if _value(args, option) and not _value(args, needed):
            raise ConfigError(
                f"{option} has no effect without {needed}; give it, too, or leave {option} out."
            )
    if not _value(args, "--publish-every") and not _value(args, "--publish-every-s"):
        for name in ("dir", "dtype", "table", "full-every", "keep", "signing-key"):
            if _value(args, f"--publish-{name}") is not None:
                raise ConfigError(
                    f"--publish-{name} has no effect without --publish-every or "
                    f"--publish-every-s; give one, too, or leave --publish-{name} out."
                )
    if args.resume in ("latest", "auto") and not args.checkpoint_dir:
        raise ConfigError(
            f"--resume {args.resume} looks for the newest checkpoint in --checkpoint-dir; give "
            "that, too, or the path of a checkpoint."
        )
