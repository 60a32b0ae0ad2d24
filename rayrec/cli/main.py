"""Entry point of the `rayrec` command: one parser, one subcommand per module.

A user's mistake ends in one line and code 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.cli import calibrate, make_data, plan
from rayrec.command import Parser, run_command
from rayrec.version import VERSION


def build_parser() -> Parser:
    """The parser with all subcommands; each sets `run`."""
    parser = Parser(prog="rayrec", description="Sharded embeddings for recommendation models.")
    parser.add_argument("--version", action="version", version=f"rayrec {VERSION}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan.add_parser(subcommands)
    calibrate.add_parser(subcommands)
    make_data.add_parser(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code, see `rayrec.command`."""
    return run_command(_run, argv)


def _run(argv: Sequence[str] | None) -> int:
    options = build_parser().parse_args(argv)
    options.run(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
