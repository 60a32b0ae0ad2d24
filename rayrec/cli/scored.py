"""What `rayrec evaluate` and `rayrec predict` share: the checkpoint, the rows, and the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from rayrec import arguments
from rayrec.cli.base import PATH, Checked, F, count, rank_options

OPTIONS = [
    click.argument("checkpoint", type=PATH, metavar="CHECKPOINT"),
    click.option(
        "--data",
        type=PATH,
        required=True,
        metavar="PATH",
        help="folder, file or URI of Parquet or Arrow files, or a folder that `rayrec make-data` "
        "wrote, whose eval/ is taken",
    ),
    click.option(
        "--schema",
        type=PATH,
        metavar="FILE",
        help="JSON file that says which columns are what; by default the checkpoint's",
    ),
    click.option(
        "--where", metavar="CONDITION", help="which rows are taken, such as \"day >= '2026-11-01'\""
    ),
    click.option(
        "--global-batch-size",
        type=count(),
        default=16_384,
        show_default=True,
        metavar="B",
        help="rows scored at a time over all ranks",
    ),
    click.option(
        "--timeout",
        type=Checked(arguments.seconds, "seconds"),
        default=300,
        show_default=True,
        metavar="SECONDS",
        help="until a hanging collective counts as failed",
    ),
    click.option("--result", type=PATH, metavar="FILE", help="JSON file for the scores"),
    rank_options(),
]


def scoring_options(function: F) -> F:
    """Add the options that `score` reads."""
    decorate: Callable[[F], F]
    for decorate in reversed(OPTIONS):
        function = decorate(function)
    return function


def score(given: dict[str, Any], out: str | None = None, keys: Sequence[str] = ()) -> None:
    """Score the checkpoint, print the scores, and write them to the file of --result.

    Args:
        given: the options of `scoring_options`, by name.
        out: file for the score of every row, or None.
        keys: columns of the data that are copied beside it.
    Raises:
        RayrecError, RunInterrupted: as `rayrec.runs.scoring.score_checkpoint`.
    """
    from rayrec.checks import absolute_path, separate_files
    from rayrec.runs.inputs import made_part, output_path
    from rayrec.runs.report import scores_line, write_result
    from rayrec.runs.scaling import scaling_from
    from rayrec.runs.scoring import Scoring, score_checkpoint

    inputs = {"--data": given["data"], "--schema": given["schema"], "--plan": given["plan"]}
    separate_files({"--result": given["result"], "--out": out}, inputs)
    result = output_path("--result", given["result"])
    scaling = ("ranks", "local", "gpu", "cpus_per_rank", "pin_cores", "placement_timeout")
    scoring = Scoring(
        checkpoint=absolute_path("CHECKPOINT", given["checkpoint"]),
        data=made_part(given["data"], "eval"),
        schema=given["schema"],
        where=given["where"],
        scaling=scaling_from(**{name: given[name] for name in scaling}),
        plan=given["plan"],
        global_batch_size=given["global_batch_size"],
        timeout_s=given["timeout"],
        predictions=output_path("--out", out),
        keys=keys,
    )
    scored = score_checkpoint(scoring)
    print(f"{scoring.checkpoint} at step {scored.step}: {scores_line(scored.scores)}")
    if scoring.predictions is not None:
        print(f"predictions: {scoring.predictions}")
    summary = {"checkpoint": scoring.checkpoint, "steps": scored.step, "ranks": scored.ranks}
    write_result(result, {**summary, "eval": scored.scores})
