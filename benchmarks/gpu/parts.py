"""The parts, and running one: here, or in a process of its own that may die or hang."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.checks import FAIL, PASS, SKIPPED, Notes, Settings


class Part(NamedTuple):
    """One part.

    Attributes:
        where: "module:function" in this package, called with settings and notes.
        limit_s: it is ended after that.
        title: what it shows.
    """

    where: str
    limit_s: int
    title: str


# in the order of what one wants to know first; limits are for a GPU and full sizes
PARTS: dict[str, Part] = {
    "machine": Part("machine:run", 60, "versions, FBGEMM loads, one lookup, bandwidth"),
    "collections": Part("equality:collections", 90, "every collection as unsharded"),
    "optimizers": Part("equality:optimizers", 120, "every optimizer and storage as unsharded"),
    "checkpoints": Part("states:checkpoints", 90, "save and restore"),
    "plans": Part("states:plans", 60, "changes of plan, state_dicts"),
    "world": Part("world:run", 60, "a process group of one rank"),
    "pipeline": Part("pipeline:run", 120, "same bits with work ahead; what overlaps"),
    "cached": Part("cached:run", 90, "tables outside of the GPU's memory"),
    "attention": Part("attention:run", 150, "jagged attention as padded, and its time"),
    "host": Part("speed:host", 90, "what a step costs the host"),
    "bandwidth": Part("speed:bandwidth", 90, "a step against bytes over bandwidth"),
    "dlrm": Part("speed:rows_per_second", 120, "rows a second of a DLRM"),
    "torchrec": Part("peer:run", 150, "TorchRec on the same work, in turns"),
}


def run_here(name: str, settings: Settings, notes: Notes) -> dict[str, Any]:
    """Run a part in this process; an error outside of its checks is a failed check."""
    module, _, function = PARTS[name].where.partition(":")
    try:
        getattr(import_module(f"benchmarks.gpu.{module}"), function)(settings, notes)
    except Exception as error:
        with notes.check("the part itself"):
            raise error
    return notes.result()


def run_apart(name: str, settings: Settings, limit_s: float) -> dict[str, Any]:
    """Run a part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--into", str(into)]
        command += ["--device", settings.device, "--size", settings.size]
        command += ["--backend", settings.backend, "--seed", str(settings.seed)]
        return watch(command, into, min(limit_s, PARTS[name].limit_s))


def watch(command: Sequence[str], into: Path, limit_s: float) -> dict[str, Any]:
    """Run a command that writes a part's result into a file, and read what it wrote until its end.

    Args:
        limit_s: it is killed after that.
    """
    began = time.monotonic()
    ended = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            ended = f"ended with code {done.returncode}: {last[:300]}"
    except subprocess.TimeoutExpired:
        ended = f"not done in {limit_s:.0f} s"
    result: dict[str, Any] = {"status": FAIL, "checks": [], "figures": {}}
    if into.exists():
        result = json.loads(into.read_text())
    elif not ended:
        ended = "wrote no result"
    if ended:
        result["status"] = FAIL
        result["ended"] = ended
    return result | {"s": round(time.monotonic() - began, 1)}


def skipped(reason: str) -> dict[str, Any]:
    """The result of a part that was not begun."""
    check = {"name": "begun", "status": SKIPPED, "detail": reason}
    return {"status": SKIPPED, "checks": [check], "figures": {}, "s": 0.0}


def summary(result: dict[str, Any]) -> str:
    """One line on a part: the first failure, or why it was skipped, or what was measured."""
    checks = result["checks"]
    bad = [check for check in checks if check["status"] == FAIL]
    if bad or "ended" in result:
        what = f"{bad[0]['name']}: {bad[0]['detail']}" if bad else ""
        return "; ".join(text for text in (result.get("ended", ""), what) if text)
    passed = [check for check in checks if check["status"] == PASS]
    reasons = dict.fromkeys(check["detail"] for check in checks if check["status"] == SKIPPED)
    shown = [f"{check['name']}: {text}" for check in passed if (text := _measured(check))]
    return "; ".join(shown[:3] or reasons)


def counts(result: dict[str, Any]) -> str:
    """Checks that passed, failed and were skipped, as "22 / 0 / 28"."""
    found = [check["status"] for check in result["checks"]]
    return " / ".join(str(found.count(status)) for status in (PASS, FAIL, SKIPPED))


def _measured(check: dict[str, Any]) -> str:
    found = []
    for key in ("GB/s", "rows/s", "times as fast", "share of bandwidth", "hit rate", "us", "ms"):
        value = check.get(key)
        if isinstance(value, dict):
            value = value.get("median")
        if value is not None:
            found.append(f"{value:,.6g} {key}")
    return " ".join(found[:2])
