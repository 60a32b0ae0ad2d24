"""The time from `python -m jobs.train_dlrm` to the first step, by part, and what any program of
these parts would pay.

    python -m benchmarks.startup [--ranks 2] [--rounds 3] [--rows 200000]

Each round runs the job for a few steps on data that it makes for itself, with a private Ray
cluster, and beside it a process that only imports torch. Parts follow each other; Ray starts while
the data are made, the ranks import torch while the driver plans.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.workload import quartiles


def start_up(args: argparse.Namespace) -> dict[str, float]:
    """Seconds by part of one run of the job."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [
            sys.executable,
            "-m",
            "jobs.train_dlrm",
            "--ranks",
            str(args.ranks),
            "--result",
            str(result),
        ]
        rows = (f"data.planted.rows_train={args.rows}", "data.planted.rows_eval=1000")
        command += [word for key in ("run.steps=3", *rows) for word in ("--set", key)]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300
        )
        parts: dict[str, float] = json.loads(result.read_text())["startup_s"]
    return parts | {"to the first step": sum(parts.values())}


def main() -> None:
    """Run, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of data that the job makes")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for part, taken in start_up(args).items():
            seconds.setdefault(part, []).append(taken)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
        seconds.setdefault("(a process that only imports torch)", []).append(
            time.perf_counter() - start
        )
    results = {part: quartiles(taken) for part, taken in seconds.items()}
    lines = ["| part | s, median (min to max) |", "|---|---|"]
    lines += [
        f"| {part} | {q['median']:.2f} ({q['min']:.2f} to {q['max']:.2f}) |"
        for part, q in results.items()
    ]
    report.show("startup", results, lines)


if __name__ == "__main__":
    main()
