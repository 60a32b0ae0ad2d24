"""The parts that jobs.convert_criteo and jobs.convert_movielens share: options, checks, result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rayrec import arguments
from rayrec.command import Parser
from rayrec.data.converted import PARTS


class Converted(NamedTuple):
    """The data that a conversion wrote, the schema that they fit, and their rows."""

    train: Path
    eval: Path
    schema: Path
    rows_train: int
    rows_eval: int


def converted(out: str | Path, rows_train: int, rows_eval: int) -> Converted:
    """The parts of the folder `out` after a conversion."""
    train, evaluation, schema = (Path(out) / name for name in PARTS[:3])
    return Converted(train, evaluation, schema, rows_train, rows_eval)


def new_parser(prog: str, description: str, held_out: str, drawn: str) -> Parser:
    """Make a parser of the options that both jobs have.

    Args:
        held_out: the rows that are held out, as the help calls them.
        drawn: how their share is meant.
    """
    parser = Parser(prog=prog, description=description)
    add = parser.add_argument
    text = "width of every table (default %(default)s)"
    add("--dim", type=arguments.whole(), default=16, help=text)
    text = f"which {held_out} are held out (default %(default)s)"
    add("--seed", type=arguments.seed, default=0, help=text)
    text = f"share of {drawn} (default %(default)s)"
    add("--eval-fraction", type=arguments.fraction, default=0.1, help=text)
    add("--overwrite", action="store_true", help="replace what an earlier conversion left in OUT")
    return parser


def convert(
    parser: Parser, argv: Sequence[str] | None, function: Callable[..., Converted], rows: str
) -> int:
    """Call a conversion with its options by their names, and print what it made.

    Args:
        rows: the word for what was converted.
    Returns:
        The exit code.
    """
    options = vars(parser.parse_args(argv))
    options.pop("debug", None)  # of the command, not of the conversion
    done = function(**options)
    print(
        f"{done.rows_train} {rows} in {done.train}, {done.rows_eval} in {done.eval}, schema "
        f"{done.schema}"
    )
    return 0
