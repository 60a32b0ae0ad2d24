"""Has Ray drain this node when AWS announces that it takes the spot machine back.

    python -m rayrec.machine.spot_notice

It runs beside the raylet of a node until the notice comes, which is two minutes before the end. It
asks the machine's metadata service every five seconds, and then calls `ray drain-node` with the
time that is left. Drivers see the draining node, and their runs leave it or save. On a machine that
is not of AWS it ends at once, with a line that says so. Standard library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

METADATA = "http://169.254.169.254/latest"
LOOK_S = 5.0
ANSWER_S = 5.0
# so many looks without an answer, one after another, are no passing trouble
MOST_SILENT = 12


def announced_end(metadata: str = METADATA) -> float | None:
    """Return when AWS takes this machine back, in wall clock seconds; None without a notice.

    Args:
        metadata: address of the machine's metadata service.
    Raises:
        OSError: the service does not answer.
        ValueError: its answer is no notice.
    """
    lasts = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    asked = Request(f"{metadata}/api/token", method="PUT", headers=lasts)
    with urlopen(asked, timeout=ANSWER_S) as answer:
        token = answer.read().decode()
    path = f"{metadata}/meta-data/spot/instance-action"
    request = Request(path, headers={"X-aws-ec2-metadata-token": token})
    try:
        with urlopen(request, timeout=ANSWER_S) as answer:
            notice = json.loads(answer.read())
    except HTTPError as error:
        if error.code == 404:
            return None
        raise
    if not isinstance(notice, dict) or not isinstance(notice.get("time"), str):
        raise ValueError(f"{path} says {notice!r}, which has no time")
    when = datetime.strptime(notice["time"], "%Y-%m-%dT%H:%M:%SZ")
    return when.replace(tzinfo=UTC).timestamp()


def drain_command(left_s: float) -> list[str]:
    """The command that has Ray drain the node where it runs."""
    words = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    words += ["--reason-message", "AWS takes this spot machine back"]
    return [*words, "--deadline-remaining-seconds", str(max(0, int(left_s)))]


def watch(
    metadata: str, run: Callable[[Sequence[str]], int], look_s: float = LOOK_S
) -> tuple[int, str]:
    """Wait for the notice and act on it; return the exit code and a line on what happened.

    Args:
        metadata: address of the machine's metadata service.
        run: runs a command and gives its exit code.
        look_s: between two looks.
    """
    silent = 0
    seen = False
    while True:
        try:
            end = announced_end(metadata)
            silent, seen = 0, True
        except (URLError, OSError, ValueError) as error:
            silent += 1
            if not seen or silent >= MOST_SILENT:
                return 1, f"{metadata} gives no notices of a spot machine: {error}"
            end = None
        if end is not None:
            left_s = end - time.time()
            code = run(drain_command(left_s))
            done = "Ray drains this node" if code == 0 else f"ray drain-node failed with {code}"
            return code, f"AWS takes this machine back in {left_s:.0f} s; {done}"
        time.sleep(look_s)


def main() -> int:
    """Watch this machine; returns the exit code."""
    code, line = watch(METADATA, lambda words: subprocess.run(list(words), check=False).returncode)
    print(line, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
