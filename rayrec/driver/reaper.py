"""A script beside the driver that ends what a private Ray cluster leaves if the driver is killed.

Ray's own processes notice the end of a driver within seconds, but two agents of each node then try
for a minute to tell the head, which is gone, about it. This script waits for the end of its
standard input, which comes when the driver ends in whatever way, gives Ray some seconds, and kills
what is left of the cluster: processes that were born with the cluster's mark and below a raylet. It
needs the standard library only, and imports nothing of rayrec, so that it starts in a moment and
takes little memory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "RAYREC_PRIVATE_CLUSTER"
PATIENCE_S = 4.0
LIMIT_S = 40.0
QUIET_LOOKS = 10  # half seconds without a process of the cluster


def members(mark: str) -> list[int]:
    """Process ids of the cluster's agents and workers, without other programs of the driver."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended, or belongs to another user
            continue
        below_a_raylet = any(variable.startswith(b"RAY_RAYLET_PID=") for variable in environment)
        if below_a_raylet and f"{MARK}={mark}".encode() in environment:
            processes.append(int(entry.name))
    return processes


def main(mark: str) -> None:
    """Wait for the driver's end, then see to it that nothing of its cluster is left."""
    sys.stdin.buffer.read()
    time.sleep(PATIENCE_S)
    deadline = time.monotonic() + LIMIT_S
    quiet = 0
    # On a busy machine a raylet takes longer to end, and starts agents anew until it does.
    while quiet < QUIET_LOOKS and time.monotonic() < deadline:
        left = members(mark)
        quiet = 0 if left else quiet + 1
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.5)


if __name__ == "__main__":
    # a Ctrl-C is for the driver
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
