"""`rayrec train` as a job, by default on rows with planted truth.

    python -m jobs.train_dlrm --ranks 2
    python -m jobs.train_dlrm --data DIR --ranks 8 --checkpoint-dir s3://bucket/run
    ray job submit --working-dir . -- python -m jobs.train_dlrm --ranks 2 --set run.steps=50

Without a run file it takes train_dlrm.toml, which lies beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rayrec.cli.main import run, start

RUN_FILE = str(Path(__file__).with_suffix(".toml"))


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: the error of the command.
    """
    return run(["train", *(sys.argv[1:] if argv is None else argv)], RUN_FILE)


if __name__ == "__main__":
    sys.exit(start(main))
