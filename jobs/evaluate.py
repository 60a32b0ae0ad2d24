"""Score a checkpoint of `jobs.train_dlrm` on any number of ranks and under any plan.

    python -m jobs.evaluate --checkpoint runs/a/step-00001000 --eval DIR --ranks 4 --plan row_wise

The checkpoint says how to build its model; --schema is needed only when columns have other names in the data to score.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from jobs.recipe import (
    ModelRecipe,
    add_scaling_options,
    open_data,
    read_text,
    run_job,
    scaling_of,
    scores_beside_truth,
    scores_line,
    write_result,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; returns the exit code.

    Raises:
        RayrecError: see `jobs.recipe.run_job`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jobs.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, help="checkpoint directory or URI")
    parser.add_argument("--eval", required=True, help="folder or file of Parquet or Arrow files")
    parser.add_argument("--schema", help="JSON file that says which columns are what; by default the checkpoint's")
    parser.add_argument(
        "--global-batch-size", dest="global_batch", type=int, default=16_384, help="rows scored at a time over all ranks (default 16384)"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds until a hanging collective counts as failed (default 300)")
    parser.add_argument("--result", help="JSON file for the scores")
    add_scaling_options(parser)
    args = parser.parse_args(argv)

    from rayrec.checkpoint import read_manifest
    from rayrec.driver import CheckpointConfig, Driver, RunConfig

    manifest = read_manifest(args.checkpoint)
    recipe = ModelRecipe.from_extras(manifest.extras, args.checkpoint)
    if args.schema:
        recipe = replace(recipe, schema=read_text(args.schema))
    scaling = scaling_of(args)
    run = RunConfig(global_batch_size=args.global_batch, epochs=1, timeout_s=args.timeout, checkpoint=CheckpointConfig(at_end=False))
    driver = Driver(recipe, None, scaling, run, eval_data=open_data(args.eval, recipe.schema), plan=args.plan)
    scores = scores_beside_truth(driver.evaluate(args.checkpoint), args.eval)
    print(f"{args.checkpoint} at step {manifest.step}: {scores_line(scores)}")
    write_result(args.result, {"checkpoint": args.checkpoint, "steps": manifest.step, "ranks": args.ranks, "eval": scores})
    return 0


if __name__ == "__main__":
    sys.exit(run_job(main))
