"""Starting commands: warm or cold, bounded, each with a folder of its own and looked at after its
end.

A command gets an empty folder for temporary files. What is left there, what is new in the mistake's
own folder, and processes that outlive the command are told as left behind.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from tests.leftovers import processes_with
from tests.mistakes.case import BOUND_S, Ending, Mistake
from tests.mistakes.sound import COMMANDS, LINES
from tests.warm import ROOT, Warm

MARK = "RAYREC_MISTAKE"
ENDING_S = 10.0  # Ray's processes may take a moment to end after their driver
OTHERS = ("torchinductor_", "ray/", "ray")  # what torch and Ray make for themselves and keep
KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class Runner:
    """Runs mistakes one after another; several runners may work beside each other.

    Args:
        data: the folder of sound files.
        scratch: gets a folder per mistake.
        cold: start a new interpreter for every command.
    """

    def __init__(self, data: Path, scratch: Path, cold: bool = False) -> None:
        self._data, self._scratch = data, scratch
        self._warm = None if cold else Warm(self._env(scratch, {}))

    def close(self) -> None:
        """End the warm interpreter."""
        if self._warm is not None:
            self._warm.close()

    def run(self, mistake: Mistake) -> Ending:
        """Make one mistake and look at how it ends."""
        folder = self._scratch / uuid.uuid4().hex[:8]
        own, tmp = folder / "own", folder / "tmp"
        own.mkdir(parents=True)
        tmp.mkdir()
        if mistake.spoil is not None:
            mistake.spoil(own, self._data)
        before = names_below(own)
        mark = uuid.uuid4().hex
        request = {
            "module": COMMANDS[mistake.command],
            "argv": arguments(mistake, own, self._data),
            "env": self._env(tmp, {**mistake.env, MARK: mark}),
            "stdout": mistake.stdout or str(folder / "stdout"),
            "stderr": str(folder / "stderr"),
            "bound_s": BOUND_S,
            "file_bytes": mistake.file_bytes,
        }
        for name in ("stdout", "stderr"):
            (folder / name).touch()
        if self._warm is None or mistake.cold:
            code, seconds = run_cold(request)
        else:
            code, seconds = self._warm.run(request)
        left = [f"temporary {name}" for name in names_below(tmp) if not name.startswith(OTHERS)]
        new = sorted(names_below(own) - before)
        left += [name for name in new if not fnmatch(name, mistake.may_leave)]
        left += [f"process {pid}" for pid in _still_there(mark)]
        ending = Ending(
            code=code,
            stdout=(folder / "stdout").read_text(errors="replace"),
            stderr=(folder / "stderr").read_text(errors="replace"),
            seconds=seconds,
            left=tuple(left) if mistake.code != 0 else (),
        )
        shutil.rmtree(folder)
        return ending

    def _env(self, tmp: Path, more: dict[str, str]) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
        ray = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(self._scratch.parent)}  # a short path
        return {**kept, **own, **ray, **more}


def arguments(mistake: Mistake, own: Path, data: Path) -> list[str]:
    """Return the whole command line of a mistake."""
    line = f"{LINES[mistake.base]} {mistake.options}" if mistake.base else mistake.options
    words = shlex.split(line)
    return [word.replace("{own}", str(own)).replace("{data}", str(data)) for word in words]


def run_cold(request: dict[str, Any]) -> tuple[int | None, float]:
    """Run a command in a new interpreter; return its exit code, None after the bound, and its
    seconds.
    """
    command = [sys.executable, "-m", request["module"], *request["argv"]]
    if request["stdout"] == "-":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    limit = None
    if request["file_bytes"] is not None:
        sizes = (request["file_bytes"],) * 2
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, sizes)
    stdout = os.devnull if request["stdout"] == "-" else request["stdout"]
    started = time.monotonic()
    with open(stdout, "w") as out, open(request["stderr"], "w") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=request["env"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=limit,
        )
        try:
            code: int | None = process.wait(request["bound_s"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return code, time.monotonic() - started


def names_below(folder: Path) -> set[str]:
    """Return the paths of all files and folders below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _still_there(mark: str) -> list[int]:
    """Return processes of a command that outlive it, after they had a moment to end."""
    deadline = time.monotonic() + ENDING_S
    while True:
        found = processes_with(mark)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
