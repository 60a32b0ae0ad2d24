"""Convert Criteo text files to Parquet: python -m jobs.convert_criteo SOURCE... OUT."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rayrec import arguments
from rayrec.command import Parser, run_command
from rayrec.data.criteo import MAX_BUCKETS, convert_criteo


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code.

    Raises:
        RayrecError: see `rayrec.command.run_command`.
    """
    parser = Parser(
        prog="python -m jobs.convert_criteo",
        description="Write OUT/train, OUT/eval (Parquet) and OUT/schema.json from Criteo click "
        "logs: label, I1-I13, C1-C26, tab separated "
        "without a header or comma separated with one, plain or compressed, an Id column first if "
        "there is one.",
    )
    add = parser.add_argument
    add("sources", type=arguments.path, nargs="+", help="text files, read in this order")
    add("out", type=arguments.path, help="folder to write to")
    text = "ids per categorical column, by hash (default %(default)s)"
    add("--num-buckets", type=arguments.whole(1, MAX_BUCKETS), default=100_000, help=text)
    text = "width of every table (default %(default)s)"
    add("--dim", type=arguments.whole(), default=16, help=text)
    text = "share of rows held out, drawn per row (default %(default)s)"
    add("--eval-fraction", type=arguments.fraction, default=0.1, help=text)
    text = "which rows are held out (default %(default)s)"
    add("--seed", type=arguments.seed, default=0, help=text)
    add("--overwrite", action="store_true", help="replace what an earlier conversion left in OUT")
    args = parser.parse_args(argv)
    done = convert_criteo(
        args.sources,
        args.out,
        num_buckets=args.num_buckets,
        dim=args.dim,
        eval_fraction=args.eval_fraction,
        seed=args.seed,
        overwrite=args.overwrite,
    )
    print(
        f"{done.rows_train} rows in {done.train}, {done.rows_eval} in {done.eval}, schema "
        f"{done.schema}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
