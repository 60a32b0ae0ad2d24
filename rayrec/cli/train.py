"""`rayrec train`: a training run of a click model, from a run file or with the defaults."""

from __future__ import annotations

import click

from rayrec.cli.base import PATH, Command


@click.command(
    cls=Command,
    examples="""
rayrec train --data data/clicks
rayrec train run.toml --set run.steps=500 --set data.train=data/clicks/train
rayrec train run.toml --print-config > effective.toml
""",
)
@click.argument("run", type=PATH, required=False, metavar="[RUN.toml]")
@click.option(
    "--data", type=PATH, metavar="DIR", help="a folder that `rayrec make-data` wrote, to train on"
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="take this value in place of the run file's; may be repeated",
)
@click.option("--print-config", is_flag=True, help="print the complete run as TOML, and end")
@click.option("--timing", is_flag=True, help="print how long each part of the start-up took")
@click.option("--result", type=PATH, metavar="FILE", help="JSON file for the result")
def command(
    run: str | None,
    data: str | None,
    changes: tuple[str, ...],
    print_config: bool,
    timing: bool,
    result: str | None,
) -> None:
    """Train a click model (DLRM, or DLRM with DCN v2) as a run file says.

    With a storage_path, the folder of the run gets checkpoints and events.jsonl, which `rayrec
    report` draws.

    The sections of the file are model, data, scaling, run and plan; docs/cli.md has their keys.
    What it leaves out has a default, which --print-config shows. Relative paths are taken from the
    working directory. Ctrl-C and SIGTERM save where there is a storage_path and end the command
    with 130 and 143.
    """
    from rayrec.checks import separate_files
    from rayrec.errors import ConfigError
    from rayrec.runs.inputs import output_path
    from rayrec.runs.reporting import Reporting, process_start
    from rayrec.runs.run_file import RunFile
    from rayrec.runs.training import train_clicks
    from rayrec.train.events import Milestone

    if run is None and data is None and not changes and not print_config:
        raise ConfigError(
            "say what to train: a run file, or --data DIR of a folder that `rayrec make-data DIR` "
            "wrote."
        )
    milestones = [Milestone("process", process_start()), Milestone("imports")]
    settings = RunFile.read(run, changes, data)
    if print_config:
        print(settings.to_toml(), end="")
        return
    inputs = {
        "the run file": run,
        "[data] train": settings.data.train,
        "[data] eval": settings.data.eval,
        "[data] schema": settings.data.schema,
        "[plan] plan": settings.plan.plan,
        "[plan] topology": settings.plan.topology,
    }
    separate_files({"--result": result}, inputs)
    click_run = settings.click_run()
    whole = output_path("--result", result)
    train_clicks(click_run, Reporting(milestones, timing, whole, click_run.run.seed))
