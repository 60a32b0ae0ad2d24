"""Parts of all subcommands: a command with examples, and the options of ranks.

Imports click and the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import click

from rayrec.cli.ctrl_c import ended_by_ctrl_c
from rayrec.cli.values import PATH, POSITIVE, SECONDS, count
from rayrec.command import DEBUG

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A subcommand, whose help ends with examples.

    Args:
        examples: command lines for the help, one a line.
        needs: module that imports torch, as the command will. It is imported before the command
            runs, while Ctrl-C ends the process at once; "" imports none.
    """

    def __init__(self, *args: Any, examples: str, needs: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **kwargs)
        self.examples, self.needs = examples.strip().splitlines(), needs
        # `run_command` looks for the option by itself.
        text = "after an error, show its traceback, too"
        self.params.append(click.Option([DEBUG], is_flag=True, expose_value=False, help=text))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        if not ctx.resilient_parsing:  # a shell asks for completions of half a line
            self._check_values(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        if self.needs:
            with ended_by_ctrl_c():
                import_module(self.needs)
        return super().invoke(ctx)

    def _check_values(self, ctx: click.Context, args: Sequence[str]) -> None:
        """Check that no option has taken the name of the next one for its value."""
        options = {
            name: param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        for at, word in enumerate(args[:-1]):
            if word == "--":
                return
            option = options.get(word)
            if option is not None and not option.is_flag and args[at + 1] in options:
                raise click.BadOptionUsage(word, f"Option {word!r} requires an argument.", ctx)


# an option whose default the help shows, and one that names a file
default_option = partial(click.option, show_default=True)
file_option = partial(click.option, type=PATH, metavar="FILE")


def is_said(name: str) -> bool:
    """Return True if the command line gives an option of the command that runs."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    """Return a decorator that adds options and arguments, which the help shows in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


# what `rayrec.runs.scaling.scaling_from` reads, but for `local`
RANK_OPTIONS = [
    click.option("--ranks", type=count(), metavar="N", help="ranks, one Ray actor each (2)"),
    click.option("--gpu", is_flag=True, help="one GPU per rank and NCCL; default is CPU and gloo"),
    click.option(
        "--cpus-per-rank", type=POSITIVE, default=1, metavar="C", help="CPUs of a rank (1)"
    ),
    click.option("--pin-cores", is_flag=True, help="pin every CPU rank to cores of its own"),
    click.option(
        "--placement-timeout",
        type=SECONDS,
        metavar="SECONDS",
        help="seconds to wait for room on the cluster (120 where that can help)",
    ),
]
