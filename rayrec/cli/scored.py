"""Options that `rayrec evaluate` and `rayrec predict` share: checkpoint, rows, and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from rayrec.cli.base import RANK_OPTIONS, F, default_option, file_option, with_options
from rayrec.cli.values import PATH, SECONDS, count

if TYPE_CHECKING:
    from rayrec.runs.scoring import ScoringOptions

OPTIONS = [
    click.option(
        "--data",
        type=PATH,
        required=True,
        metavar="PATH",
        help="folder, file or URI of Parquet or Arrow files, or a folder that `rayrec make-data` "
        "wrote, whose eval/ is taken",
    ),
    file_option(
        "--schema", help="JSON file that says which columns are what; by default the model's"
    ),
    click.option(
        "--where", metavar="CONDITION", help="which rows are taken, such as \"day >= '2026-11-01'\""
    ),
    default_option(
        "--global-batch-size",
        type=count(),
        default=16_384,
        metavar="B",
        help="rows scored at a time over all ranks",
    ),
    default_option(
        "--timeout",
        type=SECONDS,
        default=300,
        metavar="SECONDS",
        help="until a hanging collective counts as failed",
    ),
    file_option("--result", help="JSON file for the scores"),
    *RANK_OPTIONS,
    click.option(
        "--plan",
        default="auto",
        metavar="PLAN",
        help="auto, a sharding kind for all tables, or a plan's JSON file",
    ),
    click.option("--local", is_flag=True, help="one rank in this process, without Ray"),
]


def scoring_options(metavar: str = "CHECKPOINT") -> Callable[[F], F]:
    """Return a decorator that adds the options that `score` reads."""
    return with_options([click.argument("checkpoint", type=PATH, metavar=metavar), *OPTIONS])


def scoring_of(given: dict[str, Any], **more: Any) -> ScoringOptions:
    """Return the scoring for the options of `scoring_options` but --result, and further fields."""
    from rayrec.runs.inputs import rows_to_score
    from rayrec.runs.scaling import scaling_from
    from rayrec.runs.scoring import ScoringOptions

    names = ("ranks", "local", "gpu", "cpus_per_rank", "pin_cores", "placement_timeout")
    scaling = scaling_from(**{name: given.pop(name) for name in names})
    from rayrec.checkpoint import checkpoint_path  # late: it needs torch

    return ScoringOptions(
        checkpoint=checkpoint_path("CHECKPOINT", given.pop("checkpoint")),
        data=rows_to_score(given.pop("data")),
        scaling=scaling,
        timeout_s=given.pop("timeout"),
        **given,
        **more,
    )


def score(given: dict[str, Any], out: str | None = None, keys: Sequence[str] = ()) -> None:
    """Score the checkpoint, print the scores, and write them to the file of --result.

    Args:
        given: the options of `scoring_options`, by name.
        out: file for the score of every row, or None.
        keys: columns of the data that are copied beside it.
    """
    from rayrec.checks import separate_files
    from rayrec.runs.inputs import output_path
    from rayrec.runs.reporting import write_result
    from rayrec.runs.scoring import score_checkpoint

    asked = given.pop("result")
    scoring = scoring_of(given, keys=keys)
    inputs = {"--data": scoring.data, "--schema": scoring.schema, "--plan": scoring.plan}
    separate_files({"--result": asked, "--out": out}, inputs)
    result = output_path("--result", asked)
    scoring = replace(scoring, predictions=output_path("--out", out))
    scored = score_checkpoint(scoring)
    for line in scored.lines:
        print(f"{scoring.checkpoint} at step {scored.step}: {line}")
    if scoring.predictions is not None:
        print(f"predictions: {scoring.predictions}")
    summary = {"checkpoint": scoring.checkpoint, "steps": scored.step, "ranks": scored.ranks}
    write_result(result, {**summary, "eval": scored.scores})
