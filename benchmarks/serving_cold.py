"""From nothing to ready: a predictor of a large artifact, beside reading its files once.

    python -m benchmarks.serving --cold [--rounds 5] [--cap 3200000]

Float32 tables, so that the files are large: a cap of 3,200,000 rows a table makes 4 GB. "cold"
files have left the page cache before; "warm" ones lie in it. A turn reads all files once, in one
thread, and then starts a process that loads the artifact with its checks and scores one row. Told
are the seconds of the load alone, and those of the whole process, which imports torch as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.serving import DENSE, saved, schema_of
from benchmarks.workload import quartiles
from rayrec.serve import ParityBounds, export

CHUNK = 1 << 23
READY = """
import json, sys, time
from rayrec.serve import Predictor
import torch
from rayrec.sparse import KeyedJaggedTensor
start = time.perf_counter()
predictor = Predictor.load(sys.argv[1])
loaded = time.perf_counter() - start
names = [f"f{i}" for i in range(26)]
ids = KeyedJaggedTensor(names, torch.zeros(26, dtype=torch.int64), lengths=torch.ones(26).int())
score = predictor.predict(ids, torch.zeros(1, int(sys.argv[2])))
assert score.shape == (1,)
print(json.dumps(loaded))
"""


def forget(files: list[Path]) -> None:
    """Have the files leave the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(files: list[Path]) -> float:
    """Seconds of reading all files, one after another."""
    buffer = bytearray(CHUNK)
    start = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def ready(artifact: Path) -> tuple[float, float]:
    """Seconds of the load, and of a process that loads and scores one row."""
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-c", READY, str(artifact), str(DENSE)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout), time.perf_counter() - start


def run(cap: int, rounds: int) -> None:
    """Export, time in turns, print and write."""
    load = os.getloadavg()[0]
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        artifact = Path(folder, "artifact")
        checkpoint = saved(Path(folder, "checkpoint"), schema_of(cap))
        bounds = ParityBounds(logit=100, auc=1, ne=1)
        manifest = export(checkpoint, artifact, types="fp32", bounds=bounds)
        files = [path for path in artifact.rglob("*") if path.is_file()]
        gb = sum(file.bytes for file in manifest.files()) / 1e9
        for _ in range(rounds):
            for state in ("cold", "warm"):
                if state == "cold":
                    forget(files)
                once = read_once(files)
                if state == "cold":
                    forget(files)
                loaded, whole = ready(artifact)
                for name, seconds in (("read once", once), ("load", loaded), ("process", whole)):
                    took.setdefault(f"{state}, {name}", []).append(seconds)
    lines = ["| files | what | median s | of reading once |", "|---|---|---|---|"]
    for name, seconds in took.items():
        state, what = name.split(", ")
        ratios = [a / b for a, b in zip(seconds, took[f"{state}, read once"], strict=True)]
        median, ratio = quartiles(seconds)["median"], quartiles(ratios)["median"]
        lines.append(f"| {state} | {what} | {median:.2f} | {ratio:.2f}x |")
    lines += [
        "",
        f"{gb:.1f} GB of float32 tables in {len(files)} files, {rounds} turns. The load average "
        f"was {load:.1f} before and {os.getloadavg()[0]:.1f} after.",
    ]
    report.show("serving-cold", {**took, "gb": gb, "load average": {"before": load}}, lines)
