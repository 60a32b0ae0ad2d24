"""Options that several jobs share, and what they mean as configs.

A job adds the groups that it needs to its parser. Every path is made absolute here, from the
working directory of the job, because ranks run in other directories.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec import arguments
from rayrec.checks import absolute_path, is_uri, lasting_path
from rayrec.errors import ConfigError, InputError
from rayrec.storage import probe_output
from rayrec.train.config import (
    DENSE_OPTIMIZERS,
    SPARSE_OPTIMIZERS,
    WIRE_PRECISIONS,
    CheckpointConfig,
    OptimizerConfig,
    ProfileConfig,
)

if TYPE_CHECKING:
    from rayrec.data import FileDataset
    from rayrec.driver import RunConfig, ScalingConfig

MAX_SIZE = 2**31 - 1  # of a layer, or of a list of recommendations
PROFILE_STEPS, PROFILE_SKIP = 10, 5  # as ProfileConfig has them
Group = argparse.ArgumentParser | argparse._ArgumentGroup


def sizes(text: str) -> tuple[int, ...]:
    """Parse sizes such as "64,32".

    Raises:
        argparse.ArgumentTypeError: one is no whole number above 0, or is beyond `MAX_SIZE`.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > MAX_SIZE:
        wanted = f"whole numbers above 0 and at most {MAX_SIZE}, such as 64,32"
        raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}")
    return found


def names(text: str) -> tuple[str, ...]:
    """Parse names such as "user,age".

    Raises:
        argparse.ArgumentTypeError: a name is empty, or given twice.
    """
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be names with commas between them, such as user,age"
        )
    _check_once(found)
    return found


def cutoffs(text: str) -> tuple[int, ...]:
    """Parse lengths of lists such as "10,50".

    Raises:
        argparse.ArgumentTypeError: as `sizes`, or one is given twice.
    """
    found = sizes(text)
    _check_once(found)
    return found


def _check_once(found: Sequence[object]) -> None:
    twice = [one for one in found if found.count(one) > 1]
    if twice:
        raise argparse.ArgumentTypeError(f"{twice[0]!r} is given twice; give it once")


def add_scaling_options(group: Group, *, plan: bool = True, local: bool = False) -> None:
    """Add the options of where the ranks run, which `scaling_of` reads.

    Args:
        plan: the job places tables, so that a plan can be chosen.
        local: the job can run without Ray.
    """
    add = group.add_argument
    ranks = f"number of ranks, one Ray actor each (default here {_default_ranks()})"
    add("--ranks", type=arguments.whole(), help=ranks)
    if local:
        add(
            "--local",
            action="store_true",
            help="one rank in this process, without Ray; for small runs and debuggers",
        )
    if plan:
        add(
            "--plan",
            default="auto",
            help="auto, a sharding kind such as row_wise for all tables, or a plan's JSON file",
        )
    add("--gpu", action="store_true", help="one GPU per rank and NCCL; default is CPU and gloo")
    cpus = "CPUs that Ray reserves for a rank, also its number of threads (at least one), may be a fraction (default 1)"
    add("--cpus-per-rank", type=arguments.positive, default=1, help=cpus)
    add(
        "--pin-cores",
        action="store_true",
        help="pin every CPU rank to cores of its own; see docs/performance.md",
    )
    wait = "seconds to wait for room on the cluster (default: 120 where that can help, see docs/cluster.md)"
    add("--placement-timeout", type=arguments.seconds, metavar="SECONDS", help=wait)


def scaling_of(args: argparse.Namespace) -> ScalingConfig:
    """Where the ranks run, by the options that `add_scaling_options` added.

    Raises:
        ConfigError: they contradict each other.
    """
    from rayrec.driver import ScalingConfig

    local = getattr(args, "local", False)
    if local:
        of_a_cluster = ("--ranks", "--placement-timeout", "--pin-cores")
        idle = [option for option in of_a_cluster if _value(args, option)]
        if idle:
            raise ConfigError(
                f"{idle[0]} is about the ranks of a cluster, and --local runs one rank in this process. Leave one of them out."
            )
    if args.pin_cores and (args.gpu or args.cpus_per_rank != int(args.cpus_per_rank)):
        raise ConfigError(
            "--pin-cores gives CPU ranks whole cores, which contradicts "
            f"{'--gpu' if args.gpu else f'--cpus-per-rank {args.cpus_per_rank:g}'}. Leave one of "
            "them out."
        )
    return ScalingConfig(
        num_workers=0 if local else args.ranks or _default_ranks(),
        use_gpu=args.gpu,
        cpus_per_worker=args.cpus_per_rank,
        placement_timeout_s=args.placement_timeout,
        pin_cores=args.pin_cores,
    )


def add_training_options(
    group: Group, *, batch: int, epochs: int, sparse_lr: float, dense_lr: float
) -> None:
    """Add the options of a training run, which `run_of` reads; the arguments are the job's
    defaults.
    """
    add = group.add_argument
    add(
        "--global-batch-size",
        "--global-batch",
        type=arguments.whole(),
        default=batch,
        help=f"rows of a step over all ranks (default {batch})",
    )
    add("--steps", type=arguments.whole(), help="global steps")
    add(
        "--epochs",
        type=arguments.whole(),
        help=f"passes over the data (default {epochs} when --steps is not given)",
    )
    add(
        "--optimizer",
        choices=SPARSE_OPTIMIZERS,
        default="rowwise_adagrad",
        help="of the tables (default rowwise_adagrad)",
    )
    add(
        "--sparse-lr",
        type=arguments.rate,
        default=sparse_lr,
        help=f"learning rate of the tables (default {sparse_lr})",
    )
    add(
        "--dense-optimizer",
        choices=DENSE_OPTIMIZERS,
        default="adam",
        help="of the dense part (default adam)",
    )
    add(
        "--dense-lr",
        type=arguments.rate,
        default=dense_lr,
        help=f"learning rate of the dense part (default {dense_lr})",
    )
    add(
        "--qcomms-forward",
        choices=WIRE_PRECISIONS,
        default="fp32",
        help="precision of pooled rows between ranks",
    )
    add(
        "--qcomms-backward",
        choices=WIRE_PRECISIONS,
        default="fp32",
        help="precision of their gradients",
    )
    share = "CPU ranks of one host read each other's rows in place where they can (default)"
    add("--share-tables", action=argparse.BooleanOptionalAction, default=True, help=share)
    add(
        "--seed",
        type=arguments.seed,
        default=0,
        help="of initial values and of the order of the data (default 0)",
    )
    add(
        "--timeout",
        type=arguments.seconds,
        default=300,
        help="seconds until a hanging collective counts as failed (default 300)",
    )
    add("--timing", action="store_true", help="print how long each part of the start-up took")
    profile = "time some steps by part and trace as many; DIR gets the traces and a summary"
    add("--profile", type=arguments.path, metavar="DIR", help=profile)
    timed = f"so many are timed, and then as many traced (default {PROFILE_STEPS})"
    add("--profile-steps", type=arguments.whole(), metavar="N", help=timed)
    skipped = f"steps before them (default {PROFILE_SKIP})"
    add("--profile-skip", type=arguments.whole(), metavar="N", help=skipped)


def add_keeping_options(group: Group) -> None:
    """Add the options of what a run keeps and where it starts, which `run_of` reads."""
    add = group.add_argument
    add(
        "--checkpoint-dir",
        type=arguments.path,
        metavar="DIR",
        help="folder or URI of the run's checkpoints, seen by all hosts",
    )
    add(
        "--checkpoint-every",
        type=arguments.whole(),
        metavar="N",
        help="steps between checkpoints; one is written at the end anyway",
    )
    add("--keep", type=arguments.whole(), metavar="N", help="keep only so many newest checkpoints")
    add(
        "--resume",
        type=arguments.path,
        metavar="PATH",
        help="checkpoint directory to continue from, or 'latest' of --checkpoint-dir",
    )
    add(
        "--new-data",
        action="store_true",
        help="with --resume: keep weights and step, begin the data anew",
    )
    add(
        "--init-from",
        type=arguments.path,
        metavar="PATH",
        help="checkpoint directory of another run, whose weights this one starts with",
    )
    add(
        "--init-optimizer",
        action="store_true",
        help="with --init-from: take the optimizers' state, too",
    )
    add("--result", type=arguments.path, metavar="FILE", help="JSON file for the result")


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
    """A dataset of Parquet files, or of Arrow IPC files when the path's files end in .arrow or
    .feather.

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
    """The absolute path of a file that the job writes at its end, proven writable; None without
    one.

    Raises:
        ConfigError: it cannot be written, or would be deleted after the job.
    """
    if path is None:
        return None
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


def _default_ranks() -> int:
    return min(2, os.cpu_count() or 1)


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
            "--resume latest looks for the newest checkpoint in --checkpoint-dir; give that, too, or the path of a checkpoint."
        )
