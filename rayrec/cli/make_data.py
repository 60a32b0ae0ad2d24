"""`rayrec make-data`: click data with planted truth, to try a model, a plan or a cluster on."""

from __future__ import annotations

from pathlib import Path

import click

from rayrec.cli.base import Command
from rayrec.cli.values import PATH, SEED, count


@click.command(
    cls=Command,
    needs="rayrec.data.synthetic",
    examples="""
rayrec make-data data/clicks --rows 100000
rayrec train --data data/clicks
rayrec make-data data/drift --rows 500000 --lifetime 100000
""",
)
@click.argument("out", type=PATH, metavar="DIR")
@click.option(
    "--rows", type=count(), default=1_500_000, show_default=True, metavar="N", help="to train on"
)
@click.option(
    "--eval-rows",
    type=count(2),
    default=100_000,
    show_default=True,
    metavar="N",
    help="rows to evaluate on",
)
@click.option(
    "--dim", type=count(), default=16, show_default=True, metavar="D", help="width of every table"
)
@click.option(
    "--lifetime",
    type=count(),
    metavar="ROWS",
    help="ids are born and die, and live for so many rows; tables are dynamic",
)
@click.option(
    "--seed",
    type=SEED,
    default=0,
    show_default=True,
    help="other seeds make other rows of the same kind",
)
@click.option("--overwrite", is_flag=True, help="replace data in DIR, and leave other files")
def command(
    out: str, rows: int, eval_rows: int, dim: int, lifetime: int | None, seed: int, overwrite: bool
) -> None:
    """Write click data whose best possible scores are known.

    DIR gets train/, eval/, schema.json and truth.json.
    """
    from rayrec.data.converted import new_data_set
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import write_synthetic

    config = SyntheticConfig(
        rows_train=rows, rows_eval=eval_rows, dim=dim, lifetime=lifetime, seed=seed
    )
    # The parts move into DIR when all of them are written, so nobody reads half of a file.
    with new_data_set(out, overwrite) as folder:
        write_synthetic(folder, config)
    made = Path(out)
    print(
        f"{config.rows_train} rows in {made / 'train'}, {config.rows_eval} in {made / 'eval'}, "
        f"schema {made / 'schema.json'}"
    )
