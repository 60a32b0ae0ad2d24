"""`rayrec train` as a job that trains two towers for retrieval.

    python -m jobs.convert_movielens DIR films --dim 32
    python -m jobs.train_two_tower --data films --ranks 2

Without a run file it takes train_two_tower.toml, which lies beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rayrec.cli.main import job, start

RUN_FILE = str(Path(__file__).with_suffix(".toml"))
main = job("train", RUN_FILE)

if __name__ == "__main__":
    sys.exit(start(main))
