"""The `rayrec` command: one group, one subcommand per module of this package.

A subcommand is loaded when it is used, so that `rayrec --help` imports no more than click. To add
one, write a module with a `command` in it, and one line in COMMANDS. A user's mistake ends in one
line and code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem, shell_complete

from rayrec.cli.base import CONTEXT
from rayrec.command import DEBUG
from rayrec.version import VERSION

COMPLETE = "_RAYREC_COMPLETE"  # the variable by which a shell asks for completions
COMMANDS = {  # -> what it does; the module of the same name has it as `command`
    "train": "train a click model, as a run file says",
    "evaluate": "score a checkpoint",
    "predict": "write the score of every row, by an artifact or a checkpoint",
    "export": "make a served artifact of a checkpoint",
    "serve": "answer requests for an artifact's scores",
    "inspect": "look into data or a checkpoint",
    "doctor": "find what is wrong with trained tables",
    "forget": "take the rows of keys out of all that a run has stored",
    "report": "show runs on one HTML page",
    "plan": "plan where every table lies, without a cluster",
    "calibrate": "measure the ranks of a cluster, for plans",
    "smoke": "see whether a cluster is fit to train",
    "chaos": "run a job under faults, and compare its tables",
    "make-data": "write click data whose best possible scores are known",
    "completion": "print the completion script of a shell",
}


class Group(click.Group):
    """All subcommands, each loaded when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the subcommand of a name, or None."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"rayrec.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands, without loading one."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of subcommands, without loading one."""
        return [
            CompletionItem(name, help=text)
            for name, text in COMMANDS.items()
            if name.startswith(incomplete)
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read what stands before the subcommand's own arguments."""
        # Behind "--" stands the command of another program, with options of its own.
        end = args.index("--") if "--" in args else len(args)
        ahead = [word for word in args[:end] if word == DEBUG]
        rest = [*(word for word in args[:end] if word != DEBUG), *args[end:]]
        # `--debug` may stand anywhere; the subcommand gets it.
        if rest[:1] and rest[0] in COMMANDS:
            rest = [rest[0], *ahead, *rest[1:]]
        return super().parse_args(ctx, rest)


group = Group(
    "rayrec",
    help="Sharded embeddings for recommendation models.",
    context_settings=CONTEXT,
    no_args_is_help=False,
    subcommand_metavar="COMMAND ...",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="say the version, and end",
            callback=lambda ctx, _, asked: _say_version(ctx) if asked else None,
        )
    ],
)


def _say_version(ctx: click.Context) -> None:
    print(f"rayrec {VERSION}")
    ctx.exit(0)


def run(argv: Sequence[str] | None, run_file: str | None = None) -> int:
    """Run a subcommand, also for the jobs; returns the exit code.

    Args:
        run_file: run file of `train` where the command line names none.
    """
    asked = os.environ.get(COMPLETE)
    if asked:
        return shell_complete(group, {}, "rayrec", COMPLETE, asked)
    return run_click(group, "rayrec", argv, default_map={"train": {"run": run_file}})


def run_click(command: click.Command, name: str, argv: Sequence[str] | None, **context: Any) -> int:
    """Run a command of click; returns the exit code, after one line for a mistaken command line.

    `click.Command.main` would catch signals and closed output, which `run_command` does.

    Args:
        name: the command in messages.
        context: options of its `click.Context`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with command.make_context(name, words, **context) as ctx:
            command.invoke(ctx)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else name
        says = " ".join(error.format_message().split())
        print(f"error: {says} (see {path} --help)", file=sys.stderr)
        return 2
    return 0
