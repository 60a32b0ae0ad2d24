"""Train a two-tower retrieval model and compare its recall with that of recommending what is popular.

    python -m jobs.train_two_tower --source DIR --ranks 2      DIR holds the ml-100k files; converted on the spot
    python -m jobs.train_two_tower --train DIR --eval DIR --schema FILE --query user,age --candidate item,genres --local

Trains on rows with label 1 (ratings of 4 or 5) by softmax over the batch. Then, for every user with such rows in the held-out part, all
items that the user has no training row for are ranked by brute force, by the model and by popularity, and both are printed. Ranks are Ray
actors; --local is one rank in this process, without Ray. The first query feature says who asks, the first candidate feature what is
found; each has one id per row. Files are read by all ranks, so on several machines their paths, and --work-dir, must be visible to all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.recipe import add_profile_options, add_scaling_options, print_profile, profile_of, read_text, run_job, scaling_of, write_result
from jobs.retrieval import RetrievalOutcome, RetrievalPaths, RetrievalTask, TwoTowerRecipe, write_positives
from rayrec.errors import ConfigError

MEMORY_BYTES = 4 << 30  # that tables of a --local run may take


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_two_tower", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_argument_group("data")
    data.add_argument("--source", help="folder with ml-100k.inter, ml-100k.user and ml-100k.item")
    data.add_argument("--train", help="folder of Parquet files, instead of --source")
    data.add_argument("--eval", help="held-out rows, likewise")
    data.add_argument("--schema", help="JSON file that says which columns are what")
    data.add_argument("--work-dir", help="folder for what is converted (default: a temporary one)")
    model = parser.add_argument_group("model")
    model.add_argument("--query", type=_names, default="user,age,gender,occupation,zip", help="features of the query tower")
    model.add_argument("--candidate", type=_names, default="item,genres,year", help="features of the candidate tower")
    model.add_argument("--layers", type=_sizes, default=(64, 32), help="of either tower; the last is the width of the vectors")
    model.add_argument("--temperature", type=float, default=0.1)
    model.add_argument("--no-log-q", action="store_true", help="do not correct scores for the popularity of the batch's candidates")
    model.add_argument("--dim", type=int, default=32, help="width of the tables, with --source (default 32)")
    run = parser.add_argument_group("run")
    add_scaling_options(run)  # type: ignore[arg-type]
    run.add_argument("--local", action="store_true", help="one rank in this process, without Ray")
    run.add_argument(
        "--global-batch-size", dest="global_batch", type=int, default=1024, help="rows of a step over all ranks (default 1024)"
    )
    run.add_argument("--epochs", type=int, default=20, help="passes over the positive rows (default 20)")
    run.add_argument("--sparse-lr", type=float, default=0.05)
    run.add_argument("--dense-lr", type=float, default=1e-3)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--ks", type=_sizes, default=(10, 50), help="cut-offs of the metrics (default 10,50)")
    add_profile_options(run)
    run.add_argument("--timeout", type=float, default=300, help="seconds until a hanging collective counts as failed (default 300)")
    run.add_argument("--result", help="JSON file for the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train and compare; returns the exit code.

    Raises:
        RayrecError: see `jobs.recipe.run_job`.
    """
    args = parse(argv)
    with ExitStack() as stack:
        paths = _paths(args, stack)
        outcome = _run(args, paths)
    print(f"done: step {outcome.steps}, {outcome.rows} rows in {outcome.seconds:.1f} s, train loss {outcome.train_loss:.4f}")
    for name, scores in (("two towers", outcome.model), ("popularity", outcome.popularity)):
        print(f"{name}: " + "  ".join(f"{what} {value:.4f}" for what, value in scores.items()))
    print(f"{outcome.queries} queries, {outcome.candidates} candidates")
    print_profile(outcome.profile)
    found = {name: value for name, value in asdict(outcome).items() if name != "profile"}
    write_result(args.result, {**found, "ranks": 1 if args.local else args.ranks, "seed": args.seed})
    return 0


def _run(args: argparse.Namespace, paths: RetrievalPaths) -> RetrievalOutcome:
    from rayrec.data import FeatureSchema, ParquetDataset
    from rayrec.driver.planning import find_tables, resolve_plan
    from rayrec.layout import ShardingPlan, Topology
    from rayrec.train.config import CheckpointConfig, OptimizerConfig, TrainSpec
    from rayrec.train.profile_page import ready_profile

    schema = FeatureSchema.from_json(paths.schema, "the schema")
    data = ParquetDataset(paths.positives, schema)
    recipe = TwoTowerRecipe(
        schema=paths.schema,
        query=args.query,
        candidate=args.candidate,
        layers=args.layers,
        temperature=args.temperature,
        log_q=None if args.no_log_q else paths.log_q,
    )
    tables = find_tables(recipe)
    steps = args.epochs * data.num_batches(args.global_batch, drop_last=True)  # a short batch has too few negatives
    profile = ready_profile(profile_of(args), steps)

    def task(topology: Topology) -> RetrievalTask:
        plan: ShardingPlan = resolve_plan(
            args.plan, tables, topology, global_batch_size=args.global_batch, sparse_optimizer="rowwise_adagrad"
        )
        print(plan.report(), flush=True)
        spec = TrainSpec(
            model=recipe,
            data=data,
            plan=plan,
            global_batch_size=args.global_batch,
            steps=steps,
            drop_last=True,
            seed=args.seed,
            sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=args.sparse_lr),
            dense_optimizer=OptimizerConfig(name="adam", lr=args.dense_lr),
            checkpoint=CheckpointConfig(at_end=False),
            profile=profile,
        )
        return RetrievalTask(spec=spec, paths=paths, query=args.query, candidate=args.candidate, ks=args.ks)

    if args.local:
        return _run_here(task(Topology.local(1, memory_bytes=MEMORY_BYTES)), args.timeout)
    return _run_on_ray(args, task, steps)


def _run_here(task: RetrievalTask, timeout_s: float) -> RetrievalOutcome:
    from rayrec.train.progress import ProgressLog
    from rayrec.train.seat import RankContext, Seat

    seat = Seat(rank=0, world_size=1, host="localhost", store_host="localhost", store_port=0, timeout_s=timeout_s)
    return task.run(RankContext(seat=seat, log=ProgressLog(), should_stop=lambda: False))


def _run_on_ray(args: argparse.Namespace, task: Any, steps: int) -> RetrievalOutcome:
    from rayrec.driver.controller import Controller
    from rayrec.driver.display import Display
    from rayrec.driver.topology import discover

    scaling = scaling_of(args)
    display = Display("plain", steps)
    prepare = lambda group: task(discover(group, scaling, 120.0))  # noqa: E731
    try:
        outcome: RetrievalOutcome = Controller(scaling, prepare, display.event, timeout_s=args.timeout).run()[0]
    finally:
        display.close()
    return outcome


def _paths(args: argparse.Namespace, stack: ExitStack) -> RetrievalPaths:
    work = Path(args.work_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-two-tower-")))
    if (args.source is None) == (args.train is None):
        raise ConfigError("say where the data is: --source DIR of the ml-100k files, or --train, --eval and --schema.")
    if args.source is not None:
        from rayrec.data.movielens import convert_movielens

        made = convert_movielens(args.source, work, dim=args.dim, seed=args.seed)
        train, held_out, schema = str(made.train), str(made.eval), str(made.schema)
    elif args.eval is None or args.schema is None:
        raise ConfigError("--train needs --eval DIR and --schema FILE.")
    else:
        train, held_out, schema = args.train, args.eval, args.schema
    return write_positives(train, held_out, read_text(schema), args.candidate[0], str(work / "positives"))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if not names:
        raise argparse.ArgumentTypeError("name at least one feature")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(",") if part)
    if not sizes or any(size < 1 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must be positive sizes, such as 64,32")
    return sizes


if __name__ == "__main__":
    sys.exit(run_job(main))
