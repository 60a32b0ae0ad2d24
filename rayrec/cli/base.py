"""Parts of all subcommands: a command with examples, checked values, options of ranks.

A mistake on the command line is a `click.UsageError`, which `rayrec.cli.group` prints as one line
in the words that argparse has for the jobs. Imports click and the standard library only.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from rayrec import arguments
from rayrec.command import DEBUG
from rayrec.errors import RayrecError

OPTION = r" \((--[\w-]+)(?: \w+)?\)"  # an option in a message, as in "spares (--spares)"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
F = TypeVar("F", bound=Callable[..., Any])


class Checked(click.ParamType):
    """Text that a function of `rayrec.arguments` takes: it returns the value, or says what it takes
    instead.

    Args:
        parse: text -> value; raises `argparse.ArgumentTypeError`.
        is_path: a shell completes it as a file.
    """

    def __init__(self, parse: Callable[[str], Any], name: str, is_path: bool = False) -> None:
        self._parse, self.name, self._is_path = parse, name, is_path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the checked value; defaults are values already and pass unchanged."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ArgumentTypeError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files, where the text is a path."""
        return [CompletionItem(incomplete, type="file")] if self._is_path else []


class OneOf(click.Choice[str]):
    """Type of an option that takes one of some words."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return the message that argparse has for the jobs."""
        return f"invalid choice: {value!r} (choose from {', '.join(self.choices)})"


PATH = Checked(arguments.path, "path", is_path=True)


def count(least: int = 1, most: int | None = None) -> Checked:
    """Return the type of a whole number in [least, most]."""
    return Checked(arguments.whole(least, most), "count")


class Command(click.Command):
    """A subcommand: its help ends with examples, and it says all that is missing at once.

    Args:
        examples: command lines for the help, one a line.
    """

    def __init__(self, *args: Any, examples: str, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **kwargs)
        self.examples = examples.strip().splitlines()
        # `run_command` looks for the option by itself.
        text = "after an error, show its traceback, too"
        self.params.append(click.Option([DEBUG], is_flag=True, expose_value=False, help=text))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            click.UsageError: an option lacks its value, something is missing, or is too much.
        """
        if not ctx.resilient_parsing:  # a shell asks for completions of half a line
            self._check_values(ctx, args)
        # Surplus arguments are told in the words of argparse, after missing ones.
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, list(args))
        except click.MissingParameter:
            raise click.UsageError(_required(self._missing(ctx, args)), ctx) from None
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        if rest and not ctx.resilient_parsing:
            raise click.UsageError(f"unrecognized arguments: {' '.join(rest)}", ctx)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; hints in its errors to options that only the jobs have are left out.

        Raises:
            RayrecError: the error of the command.
        """
        try:
            return super().invoke(ctx)
        except RayrecError as error:
            own = {name for param in self.get_params(ctx) for name in param.opts}
            said = re.sub(OPTION, lambda found: found[0] if found[1] in own else "", str(error))
            error.args = (said, *error.args[1:])
            raise

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
                raise click.BadOptionUsage(word, "", ctx)

    def _missing(self, ctx: click.Context, args: list[str]) -> list[click.Parameter]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        return [
            param
            for param in self.get_params(ctx)
            if param.required and param.value_is_missing(param.consume_value(ctx, given)[0])
        ]


def _required(missing: Sequence[click.Parameter]) -> str:
    return f"the following arguments are required: {', '.join(map(name_of, missing))}"


def name_of(param: click.Parameter) -> str:
    """Return the longest name of an option, or the placeholder of an argument."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.make_metavar(click.Context(click.Command(""))).strip("[].")


def words(error: click.UsageError) -> str:
    """Return a mistake on the command line in the words of argparse, which the jobs use."""
    if isinstance(error, click.NoSuchOption):
        near = f" (did you mean {error.possibilities[0]}?)" if error.possibilities else ""
        return f"unrecognized arguments: {error.option_name}{near}"
    if isinstance(error, click.BadOptionUsage):
        takes_none = "does not take" in error.message
        return f"argument {error.option_name}: expected {'no' if takes_none else 'one'} argument"
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"argument {name_of(error.param)}: {error.message}"
    return error.message


def rank_options(*, plan: bool = True, local: bool = True) -> Callable[[F], F]:
    """Return a decorator that adds the options that `rayrec.runs.scaling.scaling_from` reads.

    Args:
        plan: the command places tables, so that a plan can be chosen.
        local: the command can run without Ray.
    """
    number = Checked(arguments.positive, "number")
    seconds = Checked(arguments.seconds, "seconds")
    option = click.option
    wait = "seconds to wait for room on the cluster (120 where that can help)"
    options = [
        option("--ranks", type=count(), metavar="N", help="ranks, one Ray actor each (2)"),
        option("--gpu", is_flag=True, help="one GPU per rank and NCCL; default is CPU and gloo"),
        option("--cpus-per-rank", type=number, default=1, metavar="C", help="CPUs of a rank (1)"),
        option("--pin-cores", is_flag=True, help="pin every CPU rank to cores of its own"),
        option("--placement-timeout", type=seconds, metavar="SECONDS", help=wait),
    ]
    if plan:
        text = "auto, a sharding kind for all tables, or a plan's JSON file"
        options.append(option("--plan", default="auto", metavar="PLAN", help=text))
    if local:
        text = "one rank in this process, without Ray"
        options.append(option("--local", is_flag=True, help=text))

    def decorate(function: F) -> F:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate
