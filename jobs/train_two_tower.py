"""Train a two-tower retrieval model and compare its recall with that of popularity.

    python -m jobs.train_two_tower --source DIR --ranks 2      DIR holds the ml-100k files
    python -m jobs.train_two_tower --train DIR --eval DIR --schema FILE --local \\
        --query user,age --candidate item,genres

Trains on rows with label 1 (ratings of 4 or 5) by softmax over the batch. Then, for every user with
such rows in the held-out part, all items that the user has no training row for are ranked by brute
force, by the model and by popularity, and both are printed. Ranks are Ray actors; --local is one
rank in this process, without Ray. The first query feature says who asks, the first candidate
feature what is found; each has one id per row. Files are read by all ranks, so on several machines
their paths, and --work-dir, must be visible to all. Ctrl-C and SIGTERM save where there is a
--checkpoint-dir and end the job with 130 and 143.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jobs.options import (
    add_keeping_options,
    add_scaling_options,
    add_training_options,
    cutoffs,
    sizes,
)
from jobs.settings import output_path, read_text, run_of, scaling_of
from rayrec import arguments
from rayrec.checks import absolute_path, separate_files
from rayrec.command import Parser, run_command
from rayrec.errors import ConfigError
from rayrec.runs.reporting import Reporting, process_start
from rayrec.runs.towers import TowerRun, TwoTowerModel, train_towers
from rayrec.storage import probe_output
from rayrec.train.events import Milestone
from rayrec.train.optimizer_config import DEFAULT_DENSE, DEFAULT_SPARSE

DIM = 32  # width of the tables of converted data


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(prog="python -m jobs.train_two_tower", description=__doc__)
    data = parser.add_argument_group("data")
    add = data.add_argument
    text = "folder of MovieLens-100k: u.data, u.user and u.item, or ml-100k.inter, .user and .item"
    add("--source", type=arguments.path, help=text)
    add("--train", type=arguments.path, help="folder of Parquet files, instead of --source")
    add("--eval", type=arguments.path, help="held-out rows, likewise")
    add("--schema", type=arguments.path, help="JSON file that says which columns are what")
    text = "folder for what is converted (default: a temporary one)"
    add("--work-dir", type=arguments.path, help=text)
    model = parser.add_argument_group("model")
    add = model.add_argument
    text = "features of the query tower"
    add("--query", type=arguments.names, default="user,age,gender,occupation,zip", help=text)
    text = "features of the candidate tower"
    add("--candidate", type=arguments.names, default="item,genres,year", help=text)
    text = "of either tower; the last is the width of the vectors"
    add("--layers", type=sizes, default=(64, 32), help=text)
    text = "scores are divided by it in training (default 0.1)"
    add("--temperature", type=arguments.positive, default=0.1, help=text)
    text = "do not correct scores for the popularity of the batch's candidates"
    add("--no-log-q", action="store_true", help=text)
    text = f"width of the tables, with --source (default {DIM})"
    add("--dim", type=arguments.whole(), metavar="D", help=text)
    add("--ks", type=cutoffs, default=(10, 50), help="cut-offs of the metrics (default 10,50)")
    run = parser.add_argument_group("run")
    add_scaling_options(run, local=True)
    own = {"sparse": replace(DEFAULT_SPARSE, lr=0.05), "dense": replace(DEFAULT_DENSE, lr=1e-3)}
    add_training_options(run, batch=1024, epochs=20, **own)
    add_keeping_options(parser.add_argument_group("what is kept, and where a run starts"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train and compare; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: see `rayrec.command.run_command`.
    """
    args = parse(argv)
    timing = [Milestone("process", process_start()), Milestone("imports")]
    inputs = {"--train": args.train, "--eval": args.eval, "--schema": args.schema}
    separate_files({"--result": args.result}, {**inputs, "--plan": args.plan})
    args.result = output_path("--result", args.result)
    # checked before data are converted: a run that cannot be costs nothing
    run, scaling = run_of(args, epochs=20, extras={}), scaling_of(args)
    model = TwoTowerModel(
        query=args.query,
        candidate=args.candidate,
        layers=args.layers,
        temperature=args.temperature,
        log_q=not args.no_log_q,
        ks=args.ks,
    )
    with ExitStack() as stack:
        rows, work = _rows(args, stack)
        tower_run = TowerRun(
            model=model,
            run=run,
            scaling=scaling,
            train=rows.train,
            eval=rows.eval,
            schema=rows.schema,
            schema_source=args.schema or "the schema",
            work_dir=str(work),
            plan=args.plan,
        )
        train_towers(tower_run, Reporting(timing, args.timing, args.result, args.seed))
    return 0


class RetrievalRows(NamedTuple):
    """All rows, those of any label: two paths, and the JSON text of the schema."""

    train: str
    eval: str
    schema: str


def _rows(args: argparse.Namespace, stack: ExitStack) -> tuple[RetrievalRows, Path]:
    """Return the rows, converted if need be, and the folder for derived files."""
    if (args.source is None) == (args.train is None):
        raise ConfigError(
            "say where the data is: --source DIR of the ml-100k files, or --train, --eval and "
            "--schema."
        )
    if args.train is not None and (args.eval is None or args.schema is None):
        raise ConfigError("--train needs --eval DIR and --schema FILE.")
    if args.source is not None and (args.eval is not None or args.schema is not None):
        raise ConfigError("--eval and --schema go with --train; --source brings its own.")
    if args.source is None and args.dim is not None:
        raise ConfigError(
            "--dim is of the tables that --source makes; with --train, --schema says it."
        )
    if args.train is not None:
        schema = read_text("--schema", args.schema)
        train, held_out = absolute_path("--train", args.train), absolute_path("--eval", args.eval)
        return RetrievalRows(train, held_out, schema), Path(_work_folder(args, stack))
    from jobs.convert_movielens import convert_movielens

    work = Path(_work_folder(args, stack))
    made = convert_movielens(
        args.source, work / "data", dim=args.dim or DIM, seed=args.seed, overwrite=True
    )
    return RetrievalRows(str(made.train), str(made.eval), made.schema.read_text()), work


def _work_folder(args: argparse.Namespace, stack: ExitStack) -> str:
    """Absolute path of the folder for what is converted.

    Raises:
        ConfigError: it cannot be written to.
    """
    if args.work_dir is None:
        return stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-two-tower-"))
    folder = absolute_path("--work-dir", args.work_dir)
    probe_output("converted data (--work-dir)", f"{folder}/probe")
    return folder


if __name__ == "__main__":
    sys.exit(run_command(main))
