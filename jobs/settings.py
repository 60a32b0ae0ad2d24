"""What the options of the jobs mean: where ranks run, how a run trains, which data it reads.

Every path is made absolute here, from the working directory of the job, because ranks run in other
directories.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.options import PROFILE_SKIP, PROFILE_STEPS, default_ranks
from rayrec.checks import absolute_path, is_uri, lasting_path
from rayrec.errors import ConfigError, InputError
from rayrec.storage import probe_output
from rayrec.train.config import CheckpointConfig, OptimizerConfig, ProfileConfig

if TYPE_CHECKING:
    from rayrec.data import FileDataset
    from rayrec.driver import RunConfig, ScalingConfig


def scaling_of(args: argparse.Namespace) -> ScalingConfig:
    """Where the ranks run, by the options that `add_scaling_options` added.

    Raises:
        ConfigError: they contradict each other.
    """
    from rayrec.driver import ScalingConfig

    # Jobs that need a cluster do not have the option.
    local = getattr(args, "local", False)
    if local:
        of_a_cluster = ("--ranks", "--placement-timeout", "--pin-cores")
        idle = [option for option in of_a_cluster if _value(args, option)]
        if idle:
            raise ConfigError(
                f"{idle[0]} is about the ranks of a cluster, and --local runs one rank in this "
                "process. Leave one of them out."
            )
    if args.pin_cores and (args.gpu or args.cpus_per_rank != int(args.cpus_per_rank)):
        raise ConfigError(
            "--pin-cores gives CPU ranks whole cores, which contradicts "
            f"{'--gpu' if args.gpu else f'--cpus-per-rank {args.cpus_per_rank:g}'}. Leave one of "
            "them out."
        )
    return ScalingConfig(
        num_workers=0 if local else args.ranks or default_ranks(),
        use_gpu=args.gpu,
        cpus_per_worker=args.cpus_per_rank,
        placement_timeout_s=args.placement_timeout,
        pin_cores=args.pin_cores,
    )


def run_of(
    args: argparse.Namespace, *, epochs: int, extras: Mapping[str, Any], drop_last: bool = False
) -> RunConfig:
    """The run, by the options that `add_training_options` and `add_keeping_options` added.

    Args:
        epochs: how long to train when neither --steps nor --epochs is given.
        extras: JSON data that every checkpoint carries.
        drop_last: leave out a last partial batch.
    Raises:
        ConfigError: they contradict each other.
    """
    from rayrec.driver import RunConfig

    _check_together(args)
    storage, name = _storage(args.checkpoint_dir)
    return RunConfig(
        global_batch_size=args.global_batch_size,
        steps=args.steps,
        epochs=args.epochs if args.epochs is not None or args.steps is not None else epochs,
        name=name,
        storage_path=storage,
        seed=args.seed,
        sparse_optimizer=OptimizerConfig(name=args.optimizer, lr=args.sparse_lr),
        dense_optimizer=OptimizerConfig(name=args.dense_optimizer, lr=args.dense_lr),
        qcomms_forward=args.qcomms_forward,
        qcomms_backward=args.qcomms_backward,
        share_tables=args.share_tables,
        checkpoint=CheckpointConfig(
            every_n_steps=args.checkpoint_every, num_to_keep=args.keep, at_end=storage is not None
        ),
        resume_from=args.resume,
        new_data=args.new_data,
        init_from=args.init_from,
        init_optimizer_state=args.init_optimizer,
        timeout_s=args.timeout,
        drop_last=drop_last,
        profile=_profile(args),
        extras=extras,
    )


def open_data(path: str, schema: str, source: str = "the schema") -> FileDataset:
    """A dataset of Parquet files, or of Arrow IPC files by their suffix.

    Args:
        path: folder, file or URI.
        schema: the JSON text of the schema.
        source: what messages call the schema.
    Raises:
        ConfigError: the schema contradicts itself, or the path is empty.
        InputError: there is nothing to read, or there are files of both kinds.
    """
    from rayrec.data import ArrowDataset, FeatureSchema, ParquetDataset

    path = absolute_path("the data's path", path)
    names = [path]
    if not is_uri(path) and os.path.isdir(path):
        # Hidden names are looked for below the folder: the path to it may hold some.
        below = [p.relative_to(path) for p in sorted(Path(path).glob("**/*"))]
        hidden = re.compile(r"(^|/)[._]")  # which a data set leaves out
        names = [str(p) for p in below if not hidden.search(str(p))]
    arrow = [name for name in names if name.endswith(ArrowDataset.SUFFIXES)]
    parquet = [name for name in names if name.endswith(ParquetDataset.SUFFIXES)]
    if arrow and parquet:
        raise InputError(
            f"{path} holds Parquet and Arrow files, such as {parquet[0]} and {arrow[0]}; a data "
            "set is of one kind. Move those of the other kind away."
        )
    kind = ArrowDataset if arrow else ParquetDataset
    return kind(path, FeatureSchema.from_json(schema, source))


def output_path(option: str, path: str | None) -> str | None:
    """The absolute path of a file that the job writes at its end, proven writable.

    Raises:
        ConfigError: it cannot be written, or would be deleted after the job.
    """
    if path is None:
        return None
    # The probe comes before the run: hours of training must not end with a file that cannot be
    # written.
    whole = lasting_path(option, path)
    probe_output(option, whole)
    return whole


def read_text(option: str, path: str) -> str:
    """The text of the local file that an option names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {option} {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {option} {path} as text: {error}.") from None


def _storage(path: str | None) -> tuple[str | None, str]:
    """(storage path, name of the run's folder in it) of --checkpoint-dir."""
    if path is None:
        return None, "run"
    whole = lasting_path("--checkpoint-dir", path)
    parent, _, name = whole.rpartition("/")
    if not name or parent.endswith(":/"):
        raise ConfigError(
            f"--checkpoint-dir {path} names no folder for the run; add one, such as {whole}/run."
        )
    return parent or "/", name


def _profile(args: argparse.Namespace) -> ProfileConfig | None:
    if args.profile is None:
        return None
    return ProfileConfig(
        path=args.profile,
        skip_steps=args.profile_skip or PROFILE_SKIP,
        steps=args.profile_steps or PROFILE_STEPS,
    )


def _value(args: argparse.Namespace, option: str) -> Any:
    """Return the value of an option by its name; falsy where it is not given or not known here."""
    return getattr(args, option.removeprefix("--").replace("-", "_"), None)


def _check_together(args: argparse.Namespace) -> None:
    """Check that options of a run do not contradict each other, and that none is without effect.

    Raises:
        ConfigError: names two options.
    """
    for one, other in (("--steps", "--epochs"), ("--resume", "--init-from")):
        if _value(args, one) and _value(args, other):
            raise ConfigError(f"{one} contradicts {other}; give one of them.")
    for option, needed in (
        ("--checkpoint-every", "--checkpoint-dir"),
        ("--keep", "--checkpoint-dir"),
        ("--new-data", "--resume"),
        ("--init-optimizer", "--init-from"),
        ("--profile-steps", "--profile"),
        ("--profile-skip", "--profile"),
    ):
        if _value(args, option) and not _value(args, needed):
            raise ConfigError(
                f"{option} has no effect without {needed}; give it, too, or leave {option} out."
            )
    if args.resume == "latest" and not args.checkpoint_dir:
        raise ConfigError(
            "--resume latest looks for the newest checkpoint in --checkpoint-dir; give that, too, "
            "or the path of a checkpoint."
        )
