"""Is this cluster fit to train? A check of thirty seconds that says OK, or what is wrong.

    python -m jobs.smoke --ranks 2

Ray answers, the ranks find room and start, they form a process group, one all_to_all brings every
number where it belongs, and one sharded training step runs on every rank with a table cut over all
of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jobs.options import add_scaling_options
from jobs.settings import scaling_of
from rayrec.command import Parser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Check; returns the exit code.

    Raises:
        RayrecError, RunInterrupted: see `rayrec.command.run_command`.
    """
    parser = Parser(prog="python -m jobs.smoke", description=__doc__)
    add_scaling_options(parser, plan=False)
    args = parser.parse_args(argv)

    from rayrec.driver.smoke_check import check_cluster

    check_cluster(scaling_of(args), lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
