"""A warm interpreter: torch, pyarrow and Ray are imported once, and every command runs in a fork of
it.

Importing them takes four seconds of CPU time, a fork some milliseconds, so that hundreds of
commands take minutes. A fork runs a module as `python -m` does, or a program by its path, in a
process and a session of its own, and leaves through the interpreter's own end. Requests come as
JSON on standard input, one per line, and each gets an answer of one line.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

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


class Warm:
    """A warm interpreter that runs one command at a time."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the warm interpreter did not start"

    def run(self, request: dict[str, Any]) -> tuple[int | None, float]:
        """Run one command; return its exit code, None after the bound, and its seconds.

        Args:
            request: argv, env, stdout and stderr (paths), bound_s, file_bytes (the largest file,
                or None), either the name of a module or the path of a program, and maybe cwd.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["seconds"]

    def close(self) -> None:
        """End the interpreter."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10.0)


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
    sys.argv = [request.get("program", ""), *request["argv"]]
    if "cwd" in request:
        os.chdir(request["cwd"])
    if "program" in request:
        sys.path[0] = str(Path(request["program"]).parent)
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
        if "program" in request:
            runpy.run_path(request["program"], run_name="__main__")
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
