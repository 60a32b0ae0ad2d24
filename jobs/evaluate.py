"""`rayrec evaluate` as a job: python -m jobs.evaluate runs/a@best --data DIR --ranks 4"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rayrec.cli.main import run, start


def main(argv: Sequence[str] | None = None) -> int:
    """Score a checkpoint; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: the error of the command.
    """
    return run(["evaluate", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(start(main))
