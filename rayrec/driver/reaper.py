"""A script beside the driver that ends what a private Ray cluster leaves if the driver is killed.

Ray's own processes notice the end of a driver within seconds, but two agents of each node then try
for a minute to tell the head, which is gone, about it. This script waits for the end of its
standard input, which comes when the driver ends in whatever way, gives Ray some seconds, and kills
what is left of the cluster.

Processes of the cluster are known by the files into which Ray has them print, below a folder of the
cluster's own. Their environment does not tell them, since Ray writes titles over it, and their
parents do not, since the raylet ends at once with the driver.

The script needs the standard library only, and imports nothing of rayrec, so that it starts in a
moment and takes little memory.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 4.0
LIMIT_S = 30.0  # a process that hangs in the kernel does not hold up the driver's end for ever


def files_of(driver: int) -> str:
    """Return a pattern of the files into which a driver's own cluster prints."""
    # Ray puts the id of the process that starts a cluster into the name of its folder.
    return rf"/session_[^/]*_{driver}/logs/[^/]*\.(out|err)"


def members(files: str, driver: int) -> set[int]:
    """Process ids that have a file of a pattern open for writing, without the driver itself."""
    prints_to = re.compile(files).search
    processes = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")}
    return {p for p in processes - {driver} if any(map(prints_to, _written_files(p)))}


def _written_files(process: int) -> Iterator[str]:
    """Files that a process has open for writing; who only reads a log is not of the cluster."""
    folder = Path(f"/proc/{process}/fd")
    try:
        links = list(folder.iterdir())
    except OSError:  # the process ended, or belongs to another user
        return
    for link in links:
        with suppress(OSError):  # the file was closed
            if link.lstat().st_mode & stat.S_IWUSR:
                yield os.readlink(link)


def main(driver: int, files: str) -> None:
    """Wait for the driver's end, then see to it that nothing of its cluster is left.

    Args:
        files: a pattern of the files that tell the processes of the cluster.
    """
    sys.stdin.buffer.read()
    ended = time.monotonic()
    while (left := members(files, driver)) and time.monotonic() < ended + LIMIT_S:
        if time.monotonic() > ended + PATIENCE_S:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    # a Ctrl-C is for the driver
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]), sys.argv[2])
