"""`rayrec train`: a training run, from a run file or with the defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rayrec.cli.base import Command, file_option
from rayrec.cli.values import PATH, RANKS

if TYPE_CHECKING:
    from rayrec.runs.toml_tree import Option


class TrainCommand(Command):
    """The command, which says of an unknown option how a key of a run is set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            near = [name for name in error.possibilities or () if name not in ("--set", "--help")]
            ask = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(
                f"No such option {error.option_name!r}.{ask} The keys of a run are set by --set, "
                "such as --set run.steps=500; docs/commands.md lists them.",
                ctx,
            ) from None


@click.command(
    cls=TrainCommand,
    needs="rayrec.runs.start",
    examples="""
rayrec train --data data/clicks
rayrec train run.toml --set run.steps=500 --set data.train=data/clicks/train
rayrec train run.toml --print-config > effective.toml
rayrec train --set data.planted.rows_train=20000 --ranks 2 --plan row_wise
""",
)
@click.argument("run", type=PATH, required=False, metavar="[RUN.toml]")
@click.option(
    "--data", type=PATH, metavar="DIR", help="a folder that `rayrec make-data` wrote, to train on"
)
@click.option(
    "--ranks",
    type=RANKS,
    metavar="N|LEAST:MOST",
    help="ranks, one Ray actor each; with LEAST:MOST the run grows and shrinks "
    "(scaling.num_workers)",
)
@click.option(
    "--local", is_flag=True, help="one rank in this process, without Ray (scaling.num_workers=0)"
)
@click.option(
    "--plan",
    metavar="PLAN",
    help="auto, a sharding kind for all tables, or a plan's JSON file (plan.plan)",
)
@click.option(
    "--checkpoint-dir",
    type=PATH,
    metavar="DIR",
    help="folder or URI of the run, seen by all hosts (run.storage_path and run.name)",
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
@file_option("--result", help="JSON file for the result")
def command(
    run: str | None,
    data: str | None,
    ranks: int | tuple[int, int] | None,
    local: bool,
    plan: str | None,
    checkpoint_dir: str | None,
    changes: tuple[str, ...],
    print_config: bool,
    timing: bool,
    result: str | None,
) -> None:
    """Train a model as a run file says: a click model, two towers, or a next-item model.

    With a storage_path, the folder of the run gets checkpoints and events.jsonl, which `rayrec
    report` draws.

    The sections of the file are model, data, scaling, run and plan; docs/cli.md has their keys.
    What it leaves out has a default, which --print-config shows. An option that stands for a key
    takes the place of what the file says, and so does --set; give one of them for a key. Relative
    paths are taken from the working directory. Ctrl-C and SIGTERM save where there is a
    storage_path and end the command with 130 and 143.
    """
    from rayrec.checks import separate_files
    from rayrec.errors import ConfigError
    from rayrec.runs.inputs import output_path
    from rayrec.runs.key_words import in_key_words
    from rayrec.runs.reporting import Reporting, process_start
    from rayrec.runs.run_file import RunFile
    from rayrec.runs.start import train
    from rayrec.train.events import Milestone

    options = _options(ranks, local, plan, checkpoint_dir)
    if run is None and data is None and not changes and not options and not print_config:
        raise ConfigError(
            "say what to train: a run file, or --data DIR of a folder that `rayrec make-data DIR` "
            "wrote."
        )
    milestones = [Milestone("process", process_start()), Milestone("imports")]
    with in_key_words():
        settings = RunFile.read(run, changes, data, options)
    if print_config and (result is not None or timing):
        raise ConfigError(
            "--print-config trains nothing, so there is no result and no timing; leave --result "
            "and --timing out."
        )
    if print_config:
        print(settings.to_toml(), end="")
        return
    constraints = settings.plan.constraints
    inputs = {
        "the run file": run,
        "[data] train": settings.data.train,
        "[data] eval": settings.data.eval,
        "[data] schema": settings.data.schema,
        # no word at all is told with the words that there are
        "[plan] plan": settings.plan.plan or None,
        "[plan] topology": settings.plan.topology,
        "[plan] constraints": constraints if isinstance(constraints, str) else None,
    }
    separate_files({"--result": result}, inputs)
    whole = output_path("--result", result)
    with in_key_words():
        train(settings, Reporting(milestones, timing, whole, settings.run.seed))


def _options(
    ranks: int | tuple[int, int] | None, local: bool, plan: str | None, folder: str | None
) -> list[Option]:
    """Return the options that stand for keys of a run file."""
    from rayrec.runs.inputs import run_folder
    from rayrec.runs.scaling import number_of_ranks
    from rayrec.runs.toml_tree import Option

    found = []
    number: Any = number_of_ranks(ranks, local)
    if number is not None:
        value = list(number) if isinstance(number, tuple) else number
        found.append(Option("--local" if local else "--ranks", ("scaling", "num_workers"), value))
    if plan is not None:
        found.append(Option("--plan", ("plan", "plan"), plan))
    if folder is not None:
        storage, name = run_folder(folder)
        found.append(Option("--checkpoint-dir", ("run", "storage_path"), storage))
        found.append(Option("--checkpoint-dir", ("run", "name"), name))
    return found
