"""`rayrec chaos`: the user's own job under faults, and whether it ends with the same tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from rayrec.chaos.moments import MOMENTS, moment_words
from rayrec.chaos.schedule import SIGNALS, Campaign, signal_words
from rayrec.cli.base import CONTEXT, Command, file_option
from rayrec.cli.values import DURATION, SEED, Parsed, count


@click.command(
    cls=Command,
    needs="rayrec.chaos.campaign",
    context_settings={**CONTEXT, "allow_interspersed_args": False},
    examples="""
rayrec chaos -- python -m jobs.train_dlrm --ranks 2 --checkpoint-dir /tmp/chaos
rayrec chaos --every 10s --driver --runs 5 --faults 20 -- python -m jobs.train_dlrm \\
    --data DIR --checkpoint-dir /tmp/chaos --set run.checkpoint.every_n_steps=50
rayrec chaos --nodes --seed 7 -- python -m jobs.train_dlrm --checkpoint-dir /tmp/chaos
""",
)
@click.option(
    "--every",
    "every_s",
    type=DURATION,
    default=20.0,
    metavar="TIME",
    help="mean time between two faults, such as 20s, 500ms or 2m (20s)",
)
@click.option(
    "--signals",
    type=Parsed(signal_words, "signals"),
    default=("KILL", "STOP"),
    metavar="SIGNAL,...",
    help=f"what ranks are struck with, of {', '.join(SIGNALS)} (KILL,STOP)",
)
@click.option(
    "--at",
    "moments",
    type=Parsed(moment_words, "moments"),
    default=(),
    metavar="MOMENT,...",
    help=f"strike ranks only at these moments, of {', '.join(MOMENTS)}; by default at any",
)
@click.option("--driver", is_flag=True, help="kill the driver as well, and start it again")
@click.option("--nodes", is_flag=True, help="lose a node as well; another one takes its place")
@click.option("--gcs", is_flag=True, help="stop Ray's control service for 20 to 45 s as well")
@click.option(
    "--seed",
    type=SEED,
    default=0,
    metavar="S",
    help="of the first run's faults; the runs after it have the next ones (0)",
)
@click.option("--runs", type=count(), default=1, metavar="N", help="runs under faults (1)")
@click.option(
    "--faults", type=count(), metavar="N", help="faults of a run at most; by default until its end"
)
@click.option(
    "--timeout",
    "hang_s",
    type=DURATION,
    default=300.0,
    metavar="TIME",
    help="a run that finishes no new step by itself for so long hangs, and is ended (300s)",
)
@file_option("--out", help="JSON file for the faults and the runs")
@click.argument("job", nargs=-1, required=True, metavar="COMMAND...")
def command(out: str | None, job: tuple[str, ...], **options: Any) -> None:
    """Run a training job under faults, and say whether it ends with the tables of a calm run.

    COMMAND is the job as you start it, behind "--". It needs --checkpoint-dir: each run gets a
    folder below it. Where it does not set them, --set run.failure.max_failures=-1 and --set
    run.resume_from=auto are added.

    The job runs once without faults, and then under faults that follow from the seed, in a Ray
    cluster of its own on this machine. Ranks are killed or frozen at random moments, from the start
    to the end. The command prints the faults, the recoveries, the time from a fault to the next
    finished step, and the steps that were done again. It ends with 1 where a run failed, hung, or
    ended with other tables.
    """
    from rayrec.chaos.campaign import Outcome, shake
    from rayrec.chaos.job import read_job, set_values
    from rayrec.runs.scaling import default_ranks
    from rayrec.runs.toml_tree import read_settings
    from rayrec.storage import probe_output, write_whole

    read = read_job(job, read_settings(None, set_values(job)).tables, default_ranks())
    what = "the outcome (--out)"
    probe_output(what, out)  # hours are spent before it is written

    def keep(outcome: Outcome) -> None:
        if out is not None:
            write_whole(what, out, outcome.to_json())

    outcome = shake(read, Campaign(**options), partial(print, flush=True), keep)
    print("\n".join(["", *outcome.table()]))
    if not outcome.is_good:
        raise click.exceptions.Exit(1)
