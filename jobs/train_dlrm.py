"""Train a click model (DLRM or DLRM with DCN v2) on a Ray cluster, or on this machine when there is none.

    python -m jobs.train_dlrm --ranks 2                        planted-truth data, made on the spot
    python -m jobs.train_dlrm --train DIR --eval DIR --schema FILE --ranks 8 --epochs 1 --checkpoint-dir s3://bucket/run
    ray job submit --working-dir . -- python -m jobs.train_dlrm --ranks 2 --steps 50

Files are read by the ranks, so on several machines their paths must be visible to all of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

from jobs.recipe import (
    MODELS,
    ModelRecipe,
    add_profile_options,
    add_scaling_options,
    open_data,
    print_profile,
    process_start,
    profile_of,
    read_text,
    run_job,
    scaling_of,
    scores_beside_truth,
    scores_line,
    seconds_by_part,
    timing_table,
    write_result,
)
from rayrec.errors import ConfigError
from rayrec.train.config import DENSE_OPTIMIZERS, SPARSE_OPTIMIZERS, WIRE_PRECISIONS
from rayrec.train.progress import Milestone


class DataPaths(NamedTuple):
    """Where the data lies."""

    train: str
    eval: str | None
    schema: str


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_dlrm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_argument_group("data")
    data.add_argument("--train", help="folder or file of Parquet or Arrow files; without it data with planted truth are made")
    data.add_argument("--eval", help="what to score after training, likewise")
    data.add_argument("--schema", help="JSON file that says which columns are what")
    data.add_argument("--rows", type=int, help="rows of the planted-truth data (default 1500000)")
    data.add_argument("--eval-rows", type=int, help="evaluation rows of the planted-truth data (default 100000)")
    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=MODELS, default="dlrm")
    model.add_argument("--dense-layers", type=_sizes, default=(64,), help="e.g. 512,256; the table width follows by itself (default 64)")
    model.add_argument("--over-layers", type=_sizes, default=(64, 32), help="the one logit follows by itself (default 64,32)")
    run = parser.add_argument_group("run")
    add_scaling_options(run)  # type: ignore[arg-type]
    run.add_argument(
        "--global-batch-size", dest="global_batch", type=int, default=4096, help="rows of a step over all ranks (default 4096)"
    )
    run.add_argument("--steps", type=int, help="global steps")
    run.add_argument("--epochs", type=int, help="passes over the data (default 1 when --steps is not given)")
    run.add_argument("--optimizer", choices=SPARSE_OPTIMIZERS, default="rowwise_adagrad", help="of the tables")
    run.add_argument("--sparse-lr", type=float, default=0.1, help="learning rate of the tables (default 0.1)")
    run.add_argument("--dense-optimizer", choices=DENSE_OPTIMIZERS, default="adam")
    run.add_argument("--dense-lr", type=float, default=3e-3, help="learning rate of the dense part (default 0.003)")
    run.add_argument("--qcomms-forward", choices=WIRE_PRECISIONS, default="fp32", help="precision of pooled rows between ranks")
    run.add_argument("--qcomms-backward", choices=WIRE_PRECISIONS, default="fp32", help="precision of their gradients")
    run.add_argument(
        "--share-tables",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="CPU ranks of one host read each other's rows in place where they can (default)",
    )
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--timing", action="store_true", help="print how long each part of the start-up took")
    add_profile_options(run)
    run.add_argument("--timeout", type=float, default=300, help="seconds until a hanging collective counts as failed (default 300)")
    keep = parser.add_argument_group("what is kept")
    keep.add_argument("--checkpoint-dir", help="folder or URI of the run's checkpoints")
    keep.add_argument("--checkpoint-every", type=int, help="steps between checkpoints; one is written at the end anyway")
    keep.add_argument("--keep", type=int, help="keep only so many newest checkpoints")
    keep.add_argument("--resume", help="checkpoint directory to continue from, or 'latest' of --checkpoint-dir")
    keep.add_argument("--result", help="JSON file for the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code.

    Raises:
        RayrecError: see `jobs.recipe.run_job`.
    """
    args = parse(argv)
    timing = [Milestone("process", process_start()), Milestone("imports")]
    with ExitStack() as stack:
        if args.train is None and args.eval is None and args.schema is None:
            from rayrec.driver.cluster import connected

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-data-"))
            with ThreadPoolExecutor(1) as pool:  # Ray starts while the data are made
                made = pool.submit(_make_data, args, folder)
                stack.enter_context(connected())
                timing.append(Milestone("Ray cluster"))
            paths, ready = made.result()
            timing.append(ready)
        else:
            paths = _given_data(args)
        return _train(args, paths, timing)


def _train(args: argparse.Namespace, paths: DataPaths, timing: list[Milestone]) -> int:
    from rayrec.driver import CheckpointConfig, Driver, OptimizerConfig, RunConfig

    recipe = ModelRecipe(model=args.model, schema=read_text(paths.schema), dense_layers=args.dense_layers, over_layers=args.over_layers)
    storage, name = _storage(args.checkpoint_dir)
    run = RunConfig(
        global_batch_size=args.global_batch,
        steps=args.steps,
        epochs=args.epochs if args.epochs or args.steps else 1,
        name=name,
        storage_path=storage,
        seed=args.seed,
        sparse_optimizer=OptimizerConfig(name=args.optimizer, lr=args.sparse_lr),
        dense_optimizer=OptimizerConfig(name=args.dense_optimizer, lr=args.dense_lr),
        qcomms_forward=args.qcomms_forward,
        qcomms_backward=args.qcomms_backward,
        share_tables=args.share_tables,
        checkpoint=CheckpointConfig(every_n_steps=args.checkpoint_every, num_to_keep=args.keep, at_end=storage is not None),
        resume_from=_resume(args),
        timeout_s=args.timeout,
        profile=profile_of(args),
        extras=recipe.to_extras(),
    )
    scaling = scaling_of(args)
    train = open_data(paths.train, recipe.schema)
    held_out = open_data(paths.eval, recipe.schema) if paths.eval else None
    driver = Driver(recipe, train, scaling, run, eval_data=held_out, plan=args.plan)
    result = driver.fit()
    timing += result.milestones
    if args.timing:
        print(timing_table(timing))
    scores = scores_beside_truth(result.metrics, paths.eval) if paths.eval else {}
    loss = "" if result.train_loss is None else f", train loss {result.train_loss:.5f}"
    print(f"{'stopped at' if result.stopped else 'done:'} step {result.steps}, {result.rows} rows, {result.rows_per_s:,.0f} rows/s{loss}")
    if scores:
        print(f"evaluation: {scores_line(scores)}")
    if result.checkpoint:
        print(f"checkpoint: {result.checkpoint}")
    print_profile(result.profile)
    summary = {
        "steps": result.steps,
        "rows": result.rows,
        "seconds": result.seconds,
        "rows_per_s": result.rows_per_s,
        "ranks": result.plan.world_size,
        "plan": {table: result.plan.kind(table) for table in result.plan.tables},
        "train_loss": result.train_loss,
        "eval": scores,
        "checkpoint": result.checkpoint,
        "stopped": result.stopped,
        "startup_s": seconds_by_part(timing),
        "model": args.model,
        "global_batch": args.global_batch,
        "seed": args.seed,
    }
    write_result(args.result, summary)
    return 0


def _given_data(args: argparse.Namespace) -> DataPaths:
    if args.train is None:
        raise ConfigError("--eval and --schema need --train DIR; without all three the job makes its own data.")
    if args.schema is None:
        raise ConfigError("--train needs --schema FILE, which says what the columns are.")
    if args.rows is not None or args.eval_rows is not None:
        raise ConfigError("--rows and --eval-rows are of planted-truth data; leave them out with --train.")
    return DataPaths(args.train, args.eval, args.schema)


def _make_data(args: argparse.Namespace, folder: str) -> tuple[DataPaths, Milestone]:
    from rayrec.data.synthetic import SyntheticConfig, write_synthetic

    chosen = {"rows_train": args.rows, "rows_eval": args.eval_rows}
    config = SyntheticConfig(**{name: rows for name, rows in chosen.items() if rows is not None}, seed=args.seed)
    print(f"making {config.rows_train} + {config.rows_eval} rows with planted truth", flush=True)
    made = write_synthetic(folder, config)
    return DataPaths(str(made.train), str(made.eval), str(made.schema)), Milestone("data")


def _storage(path: str | None) -> tuple[str | None, str]:
    """(storage path, name of the run's folder in it) of --checkpoint-dir."""
    if path is None:
        return None, "run"
    parent, _, name = path.rstrip("/").rpartition("/")
    return (parent or ("/" if path.startswith("/") else ".")), name


def _resume(args: argparse.Namespace) -> str | None:
    if args.resume != "latest":
        return str(args.resume) if args.resume else None
    if args.checkpoint_dir is None:
        raise ConfigError("--resume latest needs --checkpoint-dir, to look for the newest checkpoint in.")
    from rayrec.checkpoint import CheckpointManager

    newest = CheckpointManager(args.checkpoint_dir).latest()
    if newest is None:
        raise ConfigError(f"{args.checkpoint_dir} holds no complete checkpoint to resume from.")
    return newest


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(",") if part)
    if any(size < 1 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must be positive sizes, such as 64,32")
    return sizes


if __name__ == "__main__":
    sys.exit(run_job(main))
