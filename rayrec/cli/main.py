"""Entry point of the `rayrec` command and of its jobs: quiet at Ctrl-C from its first moment on.

`rayrec.command` turns Ctrl-C into one line, once it is loaded. Until then `ended_by_ctrl_c` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from rayrec.cli.ctrl_c import ended_by_ctrl_c

Main = Callable[[Sequence[str] | None], int]


def run(argv: Sequence[str] | None, run_file: str | None = None) -> int:
    """Run a subcommand, as `rayrec.cli.group.run` does; returns the exit code."""
    from rayrec.cli import group  # late: its imports take a while

    return group.run(argv, run_file)


def job(command: str, run_file: str | None = None) -> Main:
    """Return the `main` of a job, which runs a subcommand with the words of the job."""

    def main(argv: Sequence[str] | None = None) -> int:
        return run([command, *(sys.argv[1:] if argv is None else argv)], run_file)

    return main


def start(main: Main, argv: Sequence[str] | None = None) -> int:
    """Load the command line and call `main`; returns the exit code, see `rayrec.command`."""
    with ended_by_ctrl_c():
        from rayrec.command import run_command  # late: these imports take a while

        import_module("rayrec.cli.group")
    return run_command(main, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    return start(run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
