"""`rayrec smoke` as a job: python -m jobs.smoke --ranks 2"""

from __future__ import annotations

import sys

from rayrec.cli.main import job, start

main = job("smoke")

if __name__ == "__main__":
    sys.exit(start(main))
