"""`rayrec completion`: the script that lets a shell complete the words of `rayrec`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rayrec.cli.base import Command


@click.command(
    cls=Command,
    short_help="print the completion script of a shell",
    examples="""
eval "$(rayrec completion bash)"          # in ~/.bashrc
eval "$(rayrec completion zsh)"           # in ~/.zshrc
rayrec completion fish > ~/.config/fish/completions/rayrec.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def command(shell: str) -> None:
    """Print the script that completes commands, options and files of `rayrec` in bash, zsh or fish.

    The shell runs it at its start, and asks `rayrec` from then on.
    """
    from rayrec.cli.group import COMPLETE, group

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(group, {}, "rayrec", COMPLETE)
    print(script.source_template % script.source_vars())
