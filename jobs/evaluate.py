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
from dataclasses import replace

from jobs.options import add_scaling_options, names
from jobs.recipe import ModelRecipe
from jobs.report import scores_beside_truth, scores_line, truth_beside, write_result
from jobs.settings import open_data, output_path, read_text, scaling_of
from rayrec import arguments
from rayrec.checks import absolute_path, separate_files
from rayrec.command import Parser, run_command
from rayrec.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: see `rayrec.command.run_command`.
    """
    parser = Parser(prog="python -m jobs.evaluate", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", type=arguments.path, required=True, help="checkpoint directory or URI")
    text = "folder or file of Parquet or Arrow files"
    add("--eval", type=arguments.path, required=True, help=text)
    text = "JSON file that says which columns are what; by default the checkpoint's"
    add("--schema", type=arguments.path, help=text)
    text = "rows scored at a time over all ranks (default 16384)"
    add("--global-batch-size", type=arguments.whole(), default=16_384, help=text)
    text = "Parquet file for the score of every row"
    add("--predictions", type=arguments.path, metavar="FILE", help=text)
    text = "columns of the data to copy into --predictions"
    add("--keys", type=names, default=(), metavar="COLUMN,...", help=text)
    text = "seconds until a hanging collective counts as failed (default 300)"
    add("--timeout", type=arguments.seconds, default=300, help=text)
    add("--result", type=arguments.path, metavar="FILE", help="JSON file for the scores")
    add_scaling_options(parser, local=True)
    args = parser.parse_args(argv)
    if args.keys and args.predictions is None:
        raise ConfigError(
            "--keys are columns of --predictions; give that, too, or leave --keys out."
        )

    from rayrec.checkpoint import read_manifest
    from rayrec.driver import CheckpointConfig, Driver, RunConfig

    # Options are checked before the checkpoint is opened: a run that cannot be costs nothing.
    outputs = {"--result": args.result, "--predictions": args.predictions}
    separate_files(outputs, {"--eval": args.eval, "--schema": args.schema, "--plan": args.plan})
    args.result = output_path("--result", args.result)
    args.predictions = output_path("--predictions", args.predictions)
    checkpoint = absolute_path("--checkpoint", args.checkpoint)
    manifest = read_manifest(checkpoint)
    recipe = ModelRecipe.from_extras(manifest.extras, checkpoint)
    if args.schema:
        recipe = replace(recipe, schema=read_text("--schema", args.schema))
    scaling = scaling_of(args)
    # Nothing is trained, so the run keeps no checkpoint; a RunConfig needs steps or epochs all the
    # same.
    run = RunConfig(
        global_batch_size=args.global_batch_size,
        epochs=1,
        timeout_s=args.timeout,
        checkpoint=CheckpointConfig(at_end=False),
    )
    held_out = open_data(args.eval, recipe.schema, args.schema or f"the schema of {checkpoint}")
    truth = truth_beside(args.eval)
    driver = Driver(recipe, None, scaling, run, eval_data=held_out, plan=args.plan)
    metrics = driver.evaluate(checkpoint, predictions=args.predictions, keys=args.keys)
    scores = scores_beside_truth(metrics, truth)
    print(f"{checkpoint} at step {manifest.step}: {scores_line(scores)}")
    if args.predictions is not None:
        print(f"predictions: {args.predictions}")
    ranks = max(1, scaling.num_workers)
    result = {"checkpoint": checkpoint, "steps": manifest.step, "ranks": ranks, "eval": scores}
    write_result(args.result, result)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
