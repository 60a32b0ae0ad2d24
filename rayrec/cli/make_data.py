"""`rayrec make-data`: click data with planted truth, to try a model, a plan or a cluster on.

rayrec make-data data/clicks --rows 100000
python -m jobs.train_dlrm --train data/clicks/train --eval data/clicks/eval \\
    --schema data/clicks/schema.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rayrec import arguments
from rayrec.command import Parser


def add_parser(subcommands: argparse._SubParsersAction[Parser]) -> None:
    """Register the subcommand."""
    about = "write click data whose best possible scores are known"
    parser = subcommands.add_parser("make-data", help=about, description=__doc__)
    add = parser.add_argument
    text = "folder that gets train/, eval/, schema.json and truth.json"
    add("out", type=arguments.path, metavar="DIR", help=text)
    text = "rows to train on (%(default)s)"
    add("--rows", type=arguments.whole(), default=1_500_000, metavar="N", help=text)
    text = "rows to evaluate on (%(default)s)"
    add("--eval-rows", type=arguments.whole(2), default=100_000, metavar="N", help=text)
    text = "width of every table (%(default)s)"
    add("--dim", type=arguments.whole(), default=16, metavar="D", help=text)
    text = "other seeds make other rows of the same kind (%(default)s)"
    add("--seed", type=arguments.seed, default=0, help=text)
    add("--overwrite", action="store_true", help="replace data that are in DIR already")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the data and say where they lie. Raises RayrecError."""
    from rayrec.data.converted import new_data_set
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import write_synthetic

    config = SyntheticConfig(
        rows_train=options.rows, rows_eval=options.eval_rows, dim=options.dim, seed=options.seed
    )
    # The parts move into DIR when all of them are written, so nobody reads half of a file.
    with new_data_set(options.out, options.overwrite) as folder:
        write_synthetic(folder, config)
    out = Path(options.out)
    print(
        f"{config.rows_train} rows in {out / 'train'}, {config.rows_eval} in {out / 'eval'}, "
        f"schema {out / 'schema.json'}"
    )
