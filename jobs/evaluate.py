"""Score a checkpoint of `jobs.train_dlrm` on any number of ranks and under any plan.

    python -m jobs.evaluate --checkpoint runs/a/step-00001000 --eval DIR --ranks 4 --plan row_wise
    python -m jobs.evaluate --checkpoint runs/a/step-00001000 --eval DIR --predictions
    scores.parquet --keys user,item

The checkpoint says how to build its model; --schema is needed only when columns have other names in
the data to score. --predictions writes one row per row of the data, in the order of the files:
score (the predicted probability of label 1), label, file, row (its number in the file) and the
columns of --keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.options import add_scaling_options
from jobs.settings import output_path, scaling_of
from rayrec import arguments
from rayrec.checks import separate_files
from rayrec.command import Parser, run_command
from rayrec.errors import ConfigError
from rayrec.runs.reporting import scores_line, write_result
from rayrec.runs.scoring import ROWS, ScoringOptions, score_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: see `rayrec.command.run_command`.
    """
    parser = Parser(prog="python -m jobs.evaluate", description=__doc__)
    add = parser.add_argument
    text = "checkpoint directory or URI, or the folder of a run with @best or @latest behind it"
    add("--checkpoint", type=arguments.path, required=True, help=text)
    text = "folder or file of Parquet or Arrow files"
    add("--eval", type=arguments.path, required=True, help=text)
    text = "JSON file that says which columns are what; by default the checkpoint's"
    add("--schema", type=arguments.path, help=text)
    text = "rows scored at a time over all ranks (default 16384)"
    add("--global-batch-size", type=arguments.whole(), default=ROWS, help=text)
    text = "Parquet file for the score of every row"
    add("--predictions", type=arguments.path, metavar="FILE", help=text)
    text = "columns of the data to copy into --predictions"
    add("--keys", type=arguments.names, default=(), metavar="COLUMN,...", help=text)
    text = "seconds until a hanging collective counts as failed (default 300)"
    add("--timeout", type=arguments.seconds, default=300, help=text)
    add("--result", type=arguments.path, metavar="FILE", help="JSON file for the scores")
    add_scaling_options(parser, local=True)
    args = parser.parse_args(argv)
    if args.keys and args.predictions is None:
        raise ConfigError(
            "--keys are columns of --predictions; give that, too, or leave --keys out."
        )

    # Options are checked before the checkpoint is opened: a run that cannot be costs nothing.
    outputs = {"--result": args.result, "--predictions": args.predictions}
    separate_files(outputs, {"--eval": args.eval, "--schema": args.schema, "--plan": args.plan})
    args.result = output_path("--result", args.result)
    scaling = scaling_of(args)
    from rayrec.checkpoint import checkpoint_path  # late: it needs torch

    scoring = ScoringOptions(
        checkpoint=checkpoint_path("--checkpoint", args.checkpoint),
        data=args.eval,
        schema=args.schema,
        scaling=scaling,
        plan=args.plan,
        global_batch_size=args.global_batch_size,
        timeout_s=args.timeout,
        predictions=output_path("--predictions", args.predictions),
        keys=args.keys,
    )
    scored = score_checkpoint(scoring)
    print(f"{scoring.checkpoint} at step {scored.step}: {scores_line(scored.scores)}")
    if scoring.predictions is not None:
        print(f"predictions: {scoring.predictions}")
    result = {
        "checkpoint": scoring.checkpoint,
        "steps": scored.step,
        "ranks": scored.ranks,
        "eval": scored.scores,
    }
    write_result(args.result, result)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
