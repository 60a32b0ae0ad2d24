"""Options that several jobs share; `jobs.settings` says what they mean as configs."""

from __future__ import annotations

import argparse
from typing import get_args

from rayrec import arguments
from rayrec.runs.scaling import default_ranks
from rayrec.spec.optimizers import SPARSE_OPTIMIZERS
from rayrec.spec.schedule import Decay
from rayrec.spec.wire import WIRE_PRECISIONS
from rayrec.train.checkpoint_config import FULL_EVERY
from rayrec.train.optimizer_config import (
    DEFAULT_DENSE,
    DEFAULT_SPARSE,
    DENSE_OPTIMIZERS,
    OptimizerConfig,
)
from rayrec.train.publish_config import ROW_TYPES

MAX_SIZE = 2**31 - 1  # largest layer, and longest list of recommendations
PROFILE_STEPS, PROFILE_SKIP = 10, 5  # the defaults of ProfileConfig
Group = argparse.ArgumentParser | argparse._ArgumentGroup


def sizes(text: str) -> tuple[int, ...]:
    """Parse sizes such as "64,32".

    Raises:
        argparse.ArgumentTypeError: one is no whole number above 0, or is beyond `MAX_SIZE`.
    """
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1 or max(values) > MAX_SIZE:
        wanted = f"whole numbers above 0 and at most {MAX_SIZE}, such as 64,32"
        raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}")
    return values


def cutoffs(text: str) -> tuple[int, ...]:
    """Parse lengths of lists such as "10,50".

    Raises:
        argparse.ArgumentTypeError: as `sizes`, or one is given twice.
    """
    lengths = sizes(text)
    arguments.check_once(lengths)
    return lengths


def add_scaling_options(
    group: Group, *, plan: bool = True, local: bool = False, elastic: bool = False
) -> None:
    """Add the options of where the ranks run, which `scaling_of` reads.

    Args:
        elastic: the number of ranks may change during the job.
        plan: the job places tables, so that a plan can be chosen.
        local: the job can run without Ray.
    """
    add = group.add_argument
    # There is no default value: `scaling_of` must see whether --ranks was given beside --local.
    text = f"number of ranks, one Ray actor each (default here {default_ranks()})"
    if elastic:
        text += "; LEAST:MOST lets the run grow and shrink, see docs/resilience.md"
    add("--ranks", type=arguments.ranks if elastic else arguments.whole(), help=text)
    if local:
        text = "one rank in this process, without Ray; for small runs and debuggers"
        add("--local", action="store_true", help=text)
    if plan:
        text = "auto, a sharding kind such as row_wise for all tables, or a plan's JSON file"
        add("--plan", default="auto", help=text)
    add("--gpu", action="store_true", help="one GPU per rank and NCCL; default is CPU and gloo")
    text = (
        "CPUs that Ray reserves for a rank, also its number of threads (at least one), may be a "
        "fraction (default 1)"
    )
    add("--cpus-per-rank", type=arguments.positive, default=1, help=text)
    text = "pin every CPU rank to cores of its own; see docs/performance.md"
    add("--pin-cores", action="store_true", help=text)
    text = (
        "seconds to wait for room on the cluster (default: 120 where that can help, see "
        "docs/cluster.md)"
    )
    add("--placement-timeout", type=arguments.seconds, metavar="SECONDS", help=text)


def add_training_options(
    group: Group,
    *,
    batch: int,
    epochs: int,
    sparse: OptimizerConfig = DEFAULT_SPARSE,
    dense: OptimizerConfig = DEFAULT_DENSE,
) -> None:
    """Add the options of a training run, which `run_of` reads.

    Args:
        batch, epochs, sparse, dense: the job's defaults.
    """
    add = group.add_argument
    text = f"rows of a step over all ranks (default {batch})"
    add("--global-batch-size", "--global-batch", type=arguments.whole(), default=batch, help=text)
    add("--steps", type=arguments.whole(), help="global steps")
    text = f"passes over the data (default {epochs} when --steps is not given)"
    add("--epochs", type=arguments.whole(), help=text)
    group.set_defaults(sparse=sparse, dense=dense)
    text = f"of the tables (default {sparse.name})"
    add("--optimizer", choices=SPARSE_OPTIMIZERS, default=sparse.name, help=text)
    text = f"learning rate of the tables (default {sparse.lr}; of others see docs/optimizers.md)"
    add("--sparse-lr", type=arguments.rate, help=text)
    text = f"of the dense part (default {dense.name})"
    add("--dense-optimizer", choices=DENSE_OPTIMIZERS, default=dense.name, help=text)
    text = f"learning rate of the dense part (default {dense.lr})"
    add("--dense-lr", type=arguments.rate, help=text)
    text = "how both learning rates fall until the last step (default constant: they do not)"
    add("--schedule", choices=get_args(Decay), default="constant", help=text)
    text = "steps in which both learning rates grow from 0 at first (default 0)"
    add("--warmup", type=arguments.whole(0), default=0, metavar="N", help=text)
    text = "precision of pooled rows between ranks"
    add("--qcomms-forward", choices=WIRE_PRECISIONS, default="fp32", help=text)
    text = "precision of their gradients"
    add("--qcomms-backward", choices=WIRE_PRECISIONS, default="fp32", help=text)
    text = "CPU ranks of one host read each other's rows in place where they can (default)"
    add("--share-tables", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "of initial values and of the order of the data (default 0)"
    add("--seed", type=arguments.seed, default=0, help=text)
    text = "seconds until a hanging collective counts as failed (default 300)"
    add("--timeout", type=arguments.seconds, default=300, help=text)
    text = "seconds after which a rank that says nothing counts as lost (default 30)"
    add("--heartbeat-timeout", type=arguments.seconds, default=30, metavar="SECONDS", help=text)
    add("--timing", action="store_true", help="print how long each part of the start-up took")
    text = "time some steps by part and trace as many; DIR gets the traces and a summary"
    add("--profile", type=arguments.path, metavar="DIR", help=text)
    # These two have no default value, so that they can be refused without --profile.
    text = f"so many are timed, and then as many traced (default {PROFILE_STEPS})"
    add("--profile-steps", type=arguments.whole(), metavar="N", help=text)
    text = f"steps before them (default {PROFILE_SKIP})"
    add("--profile-skip", type=arguments.whole(), metavar="N", help=text)


def add_keeping_options(group: Group) -> None:
    """Add the options of what a run keeps and where it starts, which `run_of` reads."""
    add = group.add_argument
    text = "folder or URI of the run's checkpoints, seen by all hosts"
    add("--checkpoint-dir", type=arguments.path, metavar="DIR", help=text)
    text = "steps between checkpoints; one is written at the end anyway"
    add("--checkpoint-every", type=arguments.whole(), metavar="N", help=text)
    text = "seconds of training between checkpoints, in place of --checkpoint-every"
    add("--checkpoint-every-s", type=arguments.seconds, metavar="S", help=text)
    text = "train on while a checkpoint is written; costs a copy of it in host memory"
    add("--checkpoint-async", action="store_true", help=text)
    text = "save only the rows of tables that were touched since the last checkpoint"
    add("--checkpoint-incremental", action="store_true", help=text)
    text = f"with it: every K-th checkpoint holds all rows (default {FULL_EVERY})"
    add("--checkpoint-full-every", type=arguments.whole(2), metavar="K", help=text)
    add("--keep", type=arguments.whole(), metavar="N", help="keep only so many newest checkpoints")
    text = "failures of ranks that the run recovers from, -1 for any number (default 0)"
    add("--max-failures", type=arguments.whole(-1), default=0, metavar="N", help=text)
    text = (
        "spare processes, each with a rank's resources, that replace lost ranks at once (default 0)"
    )
    add("--spares", type=arguments.whole(0), default=0, metavar="N", help=text)
    text = "keep what undoes steps in memory, and go on from every N-th step where only ranks died"
    add("--sync-points", type=arguments.whole(), metavar="N", help=text)
    text = (
        "checkpoint directory to continue from, or 'latest' of --checkpoint-dir, or 'auto': the "
        "latest if there is one, else start"
    )
    add("--resume", type=arguments.path, metavar="PATH", help=text)
    text = "with --resume: keep weights and step, begin the data anew"
    add("--new-data", action="store_true", help=text)
    text = "checkpoint directory of another run, whose weights this one starts with"
    add("--init-from", type=arguments.path, metavar="PATH", help=text)
    text = "with --init-from: take the optimizers' state, too"
    add("--init-optimizer", action="store_true", help=text)
    add("--result", type=arguments.path, metavar="FILE", help="JSON file for the result")


def add_publishing_options(group: Group) -> None:
    """Add the options of what a run publishes for servers, which `run_of` reads."""
    add = group.add_argument
    text = "steps between publications, which servers follow; see docs/serving.md"
    add("--publish-every", type=arguments.whole(), metavar="N", help=text)
    text = "seconds of training between publications, in place of --publish-every"
    add("--publish-every-s", type=arguments.seconds, metavar="S", help=text)
    text = "local folder for them, seen by all hosts (default: published, in --checkpoint-dir)"
    add("--publish-dir", type=arguments.path, metavar="DIR", help=text)
    # These have no default value, so that they can be refused without the ones above.
    text = "type of the published rows (default int8)"
    add("--publish-dtype", choices=ROW_TYPES, help=text)
    text = "type of the rows of one table; may be repeated"
    kind = arguments.named_choice(ROW_TYPES)
    add("--publish-table", type=kind, action="append", metavar="NAME=TYPE", help=text)
    text = "every K-th publication has all rows (default: only the first after a start)"
    add("--publish-full-every", type=arguments.whole(2), metavar="K", help=text)
    text = "keep only so many newest publications with all rows, and what follows them"
    add("--publish-keep", type=arguments.whole(), metavar="N", help=text)
    text = "file with the key to sign publications with, or env:NAME (default: they are not signed)"
    add("--publish-signing-key", metavar="FILE|env:NAME", help=text)
