"""`rayrec smoke` as a job: python -m jobs.smoke --ranks 2"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rayrec.cli.main import run, start


def main(argv: Sequence[str] | None = None) -> int:
    """Check a cluster; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: the error of the command.
    """
    return run(["smoke", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(start(main))
