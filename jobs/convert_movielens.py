"""Convert MovieLens-100k to Parquet: python -m jobs.convert_movielens SOURCE OUT."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rayrec import arguments
from rayrec.command import Parser, run_command
from rayrec.data.movielens import SPLITS, convert_movielens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code.

    Raises:
        RayrecError: see `rayrec.command.run_command`.
    """
    parser = Parser(
        prog="python -m jobs.convert_movielens",
        description="Write OUT/train, OUT/eval (Parquet) and OUT/schema.json from the ml-100k "
        "files. Label: rating of 4 or 5.",
    )
    add = parser.add_argument
    text = (
        "folder with u.data, u.user and u.item, as GroupLens publishes them, or with "
        "ml-100k.inter, ml-100k.user and ml-100k.item (tab separated, header of name:type)"
    )
    add("source", type=arguments.path, help=text)
    add("out", type=arguments.path, help="folder to write to")
    text = "width of every table (default %(default)s)"
    add("--dim", type=arguments.whole(), default=16, help=text)
    text = "which ratings are held out (default %(default)s)"
    add("--seed", type=arguments.seed, default=0, help=text)
    text = "share of the ratings held out (default %(default)s)"
    add("--eval-fraction", type=arguments.fraction, default=0.1, help=text)
    text = "hold out ratings at random, or the latest by time (default %(default)s)"
    add("--split", choices=SPLITS, default="random", help=text)
    add("--overwrite", action="store_true", help="replace what an earlier conversion left in OUT")
    args = parser.parse_args(argv)
    done = convert_movielens(
        args.source,
        args.out,
        dim=args.dim,
        seed=args.seed,
        eval_fraction=args.eval_fraction,
        split=args.split,
        overwrite=args.overwrite,
    )
    print(
        f"{done.rows_train} ratings in {done.train}, {done.rows_eval} in {done.eval}, schema "
        f"{done.schema}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
