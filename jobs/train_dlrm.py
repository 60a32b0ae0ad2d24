"""Train a click model (DLRM or DLRM with DCN v2) on a Ray cluster, or on this machine alone.

    python -m jobs.train_dlrm --ranks 2                        planted-truth data, made on the spot
    python -m jobs.train_dlrm --train DIR --eval DIR --schema FILE --ranks 8 --epochs 1 \\
        --checkpoint-dir s3://bucket/run
    ray job submit --working-dir . -- python -m jobs.train_dlrm --ranks 2 --steps 50

Files are read by the ranks, so on several machines their paths must be visible to all of them.
Ctrl-C and SIGTERM save where there is a --checkpoint-dir and end the job with 130 and 143.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from jobs.options import (
    add_keeping_options,
    add_publishing_options,
    add_scaling_options,
    add_training_options,
    sizes,
)
from jobs.settings import output_path, read_text, run_of, scaling_of
from rayrec import arguments
from rayrec.checks import separate_files
from rayrec.command import Parser, run_command
from rayrec.errors import ConfigError
from rayrec.recipe import INIT_BOUND, MODELS, ModelRecipe
from rayrec.runs.reporting import Reporting, process_start
from rayrec.runs.training import ClickRun, train_clicks
from rayrec.train.events import Milestone
from rayrec.train.optimizer_config import DEFAULT_BATCH


class DataPaths(NamedTuple):
    """Paths of the data and of its schema."""

    train: str
    eval: str | None
    schema: str


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(prog="python -m jobs.train_dlrm", description=__doc__)
    data = parser.add_argument_group("data")
    add = data.add_argument
    text = "folder or file of Parquet or Arrow files; without it data with planted truth are made"
    add("--train", type=arguments.path, help=text)
    add("--eval", type=arguments.path, help="what to score after training, likewise")
    add("--schema", type=arguments.path, help="JSON file that says which columns are what")
    add("--rows", type=arguments.whole(), help="rows of the planted-truth data (default 1500000)")
    text = "evaluation rows of the planted-truth data (default 100000)"
    add("--eval-rows", type=arguments.whole(2), help=text)
    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--model", choices=MODELS, default="dlrm")
    text = "e.g. 512,256; the table width follows by itself (default 64)"
    add("--dense-layers", type=sizes, default=(64,), help=text)
    text = "the one logit follows by itself (default 64,32)"
    add("--over-layers", type=sizes, default=(64, 32), help=text)
    text = f"rows of tables start within +-BOUND, unless the schema says (default {INIT_BOUND})"
    add("--init-bound", type=arguments.positive, default=INIT_BOUND, metavar="BOUND", help=text)
    run = parser.add_argument_group("run")
    add_scaling_options(run, local=True, elastic=True)
    add_training_options(run, batch=DEFAULT_BATCH, epochs=1)
    add_keeping_options(parser.add_argument_group("what is kept, and where a run starts"))
    add_publishing_options(parser.add_argument_group("what servers follow"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: see `rayrec.command.run_command`.
    """
    args = parse(argv)
    timing = [Milestone("process", process_start()), Milestone("imports")]
    inputs = {"--train": args.train, "--eval": args.eval, "--schema": args.schema}
    separate_files({"--result": args.result}, {**inputs, "--plan": args.plan})
    args.result = output_path("--result", args.result)
    with ExitStack() as stack:
        # One of the three options is enough to mean data of the user: what is missing is then an
        # error and no reason to make data.
        given = any(path is not None for path in (args.train, args.eval, args.schema))
        paths = _given_data(args) if given else _make_data(args, stack, timing)
        return _train(args, paths, timing)


def _train(args: argparse.Namespace, paths: DataPaths, timing: list[Milestone]) -> int:
    recipe = ModelRecipe(
        model=args.model,
        schema=read_text("--schema", paths.schema),
        dense_layers=args.dense_layers,
        over_layers=args.over_layers,
        init_bound=args.init_bound,
    )
    click_run = ClickRun(
        recipe=recipe,
        run=run_of(args, epochs=1, extras={}),
        scaling=scaling_of(args),
        train=paths.train,
        eval=paths.eval,
        schema_source=paths.schema,
        plan=args.plan,
    )
    train_clicks(click_run, Reporting(timing, args.timing, args.result, args.seed))
    return 0


def _given_data(args: argparse.Namespace) -> DataPaths:
    if args.train is None:
        raise ConfigError(
            "--eval and --schema need --train DIR; without all three the job makes its own data."
        )
    if args.schema is None:
        raise ConfigError("--train needs --schema FILE, which says what the columns are.")
    if args.rows is not None or args.eval_rows is not None:
        raise ConfigError(
            "--rows and --eval-rows are of planted-truth data; leave them out with --train."
        )
    return DataPaths(args.train, args.eval, args.schema)


def _make_data(args: argparse.Namespace, stack: ExitStack, timing: list[Milestone]) -> DataPaths:
    """Make planted-truth data in a temporary folder, while Ray starts."""
    from rayrec.data.planted import SyntheticConfig
    from rayrec.runs.planted import planted_rows

    # checked before Ray starts: a run that cannot be costs nothing
    run_of(args, epochs=1, extras={})
    scaling_of(args)
    chosen = {"rows_train": args.rows, "rows_eval": args.eval_rows}
    config = SyntheticConfig(
        **{name: rows for name, rows in chosen.items() if rows is not None}, seed=args.seed
    )
    made = stack.enter_context(planted_rows(config, not args.local, timing))
    return DataPaths(str(made.train), str(made.eval), str(made.schema))


if __name__ == "__main__":
    sys.exit(run_command(main))
