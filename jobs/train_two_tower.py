"""`rayrec train` as a job that trains two towers for retrieval.

    python -m jobs.convert_movielens DIR films --dim 32
    python -m jobs.train_two_tower --data films --ranks 2

Without a run file it takes train_two_tower.toml, which lies beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rayrec.cli.main import run, start

RUN_FILE = str(Path(__file__).with_suffix(".toml"))


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and compare recall with that of popularity; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: the error of the command.
    """
    return run(["train", *(sys.argv[1:] if argv is None else argv)], RUN_FILE)


if __name__ == "__main__":
    sys.exit(start(main))
