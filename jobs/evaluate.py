"""`rayrec evaluate` as a job: python -m jobs.evaluate runs/a@best --data DIR --ranks 4"""

from __future__ import annotations

import sys

from rayrec.cli.main import job, start

main = job("evaluate")

if __name__ == "__main__":
    sys.exit(start(main))
