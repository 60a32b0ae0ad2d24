"""`rayrec train` as a job, by default on rows with planted truth.

    python -m jobs.train_dlrm --ranks 2
    python -m jobs.train_dlrm --data DIR --ranks 8 --checkpoint-dir s3://bucket/run
    ray job submit --working-dir . -- python -m jobs.train_dlrm --ranks 2 --set run.steps=50

Without a run file it takes train_dlrm.toml, which lies beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rayrec.cli.main import job, start

RUN_FILE = str(Path(__file__).with_suffix(".toml"))
main = job("train", RUN_FILE)

if __name__ == "__main__":
    sys.exit(start(main))
