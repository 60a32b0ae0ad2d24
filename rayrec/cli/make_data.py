"""`rayrec make-data`: click data with planted truth, to try a model, a plan or a cluster on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rayrec.cli.base import Command, default_option, is_said
from rayrec.cli.values import PATH, SEED, count
from rayrec.errors import ConfigError

_EVENTS_OF_USER = 50


@click.command(
    cls=Command,
    needs="rayrec.data.synthetic",
    examples="""
rayrec make-data data/clicks --rows 100000
rayrec train --data data/clicks
rayrec make-data data/drift --rows 500000 --lifetime 100000
rayrec make-data data/plays --rows 500000 --days 20
""",
)
@click.argument("out", type=PATH, metavar="DIR")
@default_option("--rows", type=count(), default=1_500_000, metavar="N", help="to train on")
@default_option(
    "--eval-rows", type=count(2), default=100_000, metavar="N", help="rows to evaluate on"
)
@default_option("--dim", type=count(), default=16, metavar="D", help="width of every table")
@click.option(
    "--lifetime",
    type=count(),
    metavar="ROWS",
    help="ids are born and die, and live for so many rows; tables are dynamic",
)
@click.option(
    "--days",
    type=count(3),
    metavar="N",
    help="an event log of N days instead, of which histories are cut; --rows are its events",
)
@click.option(
    "--drift-day",
    type=count(),
    metavar="DAY",
    help="with --days: from this day on users like other items",
)
@default_option("--seed", type=SEED, default=0, help="other seeds make other rows of the same kind")
@click.option("--overwrite", is_flag=True, help="replace data in DIR, and leave other files")
def command(
    out: str,
    rows: int,
    eval_rows: int,
    lifetime: int | None,
    days: int | None,
    drift_day: int | None,
    overwrite: bool,
    **shared: Any,
) -> None:
    """Write click data whose best possible scores are known.

    DIR gets train/, eval/, schema.json and truth.json; with --days log/ in place of train/ and
    eval/, and next_item.json, the schema for next-item models.
    """
    others, why = ["eval_rows", "lifetime"], "is not for an event log (--days)"
    if days is None:
        others, why = ["drift_day"], "needs --days"
    for name in others:
        if is_said(name):
            raise ConfigError(f"--{name.replace('_', '-')} {why}; leave it out.")
    from rayrec.data.converted import new_data_set
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.planted_log import PlantedLogConfig
    from rayrec.data.synthetic import write_synthetic
    from rayrec.data.synthetic_log import write_planted_log

    made = Path(out)
    if days is None:
        config = SyntheticConfig(rows_train=rows, rows_eval=eval_rows, lifetime=lifetime, **shared)
        # The parts move into DIR when all of them are written, so nobody reads half of a file.
        with new_data_set(out, overwrite) as folder:
            write_synthetic(folder, config)
        print(
            f"{rows} rows in {made / 'train'}, {eval_rows} in {made / 'eval'}, "
            f"schema {made / 'schema.json'}"
        )
        return
    users = -(-rows // _EVENTS_OF_USER)
    of_log = PlantedLogConfig(events=rows, users=users, days=days, drift_day=drift_day, **shared)
    with new_data_set(out, overwrite) as folder:
        log = write_planted_log(folder, of_log)
    parts = ", ".join(f"{events} for {part}" for part, events in log.events.items())
    print(f"{rows} events of {log.users} users in {made / 'log'}: {parts}")
