"""A warm interpreter: torch, pyarrow and Ray are imported once, and every command runs in a fork of
it.

Importing them takes four seconds of CPU time, a fork some milliseconds, so that hundreds of
commands take minutes. A fork runs the module as `python -m` does, in a process and a session of its
own, and leaves through the interpreter's own end. Requests come as JSON on standard input, one per
line, and each gets an answer of one line.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import time
from typing import Any

POLL_S = 0.02
HEAVY = (
    "numpy",
    "pyarrow.parquet",
    "pyarrow.dataset",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "fbgemm_gpu",
    "ray",
)
LOADED = ("rayrec.driver", "rayrec.train.tasks", "rayrec.driver.specs", "rayrec.models")


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more; in a fork, return the request that it shall run."""
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            return request
        code = _wait(child, started + request["bound_s"])
        answer = {"code": code, "seconds": time.monotonic() - started}
        print(json.dumps(answer), flush=True)
    return None


def _wait(child: int, deadline: float) -> int | None:
    """Return the exit code of a fork; None when it had to be ended."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(POLL_S)


def become(request: dict[str, Any]) -> None:
    """Turn this fork into the command of a request: its files, folder, variables and arguments."""
    os.setsid()
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        descriptor = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # TMPDIR is another one now
    sys.argv = ["", *request["argv"]]
    if request["file_bytes"] is not None:
        # Python would leave compiled modules cut short, which no later process can import
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)


def main() -> None:
    """Import what is heavy, and serve; in a fork, run the command."""
    for name in (*HEAVY, *LOADED):
        __import__(name)
    gc.freeze()  # else every fork walks, and so copies, all that was imported
    print("ready", flush=True)
    request = serve()
    if request is not None:
        become(request)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
