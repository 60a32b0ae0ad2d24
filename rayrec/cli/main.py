"""Entry point of the `rayrec` command: one parser, one subcommand per module. A user's mistake ends in one line, not in a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rayrec.cli import calibrate, plan
from rayrec.errors import RayrecError


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; each sets `run`."""
    parser = argparse.ArgumentParser(prog="rayrec", description="Sharded embeddings for recommendation models.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan.add_parser(subcommands)
    calibrate.add_parser(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status: 0, or 1 with a line on standard error when rayrec refuses what was asked."""
    options = build_parser().parse_args(argv)
    try:
        options.run(options)
    except (RayrecError, OSError) as error:
        print(f"rayrec {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
