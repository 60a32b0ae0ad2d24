"""One user with many candidates: the history is encoded once, whatever their number.

    python -m benchmarks.candidates RUN [RUN ...] [--rounds 30]

Exports runs of `benchmarks.next_item --work DIR` (DIR/0/HSTU-sampled-softmax and the like) as fp32,
and asks for the scores of 1, 64 and 512 candidates of one history of 50 films, and for those of 512
rows with a candidate each. The requests take turns in each round. A row says the median over the
rounds of the CPU time, which a busy machine stretches less than the wall, and its ratio to that of
one candidate. All are compared with the scores of the rows first.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.next_item import LENGTH
from benchmarks.workload import quartiles
from rayrec.checkpoint import checkpoint_path
from rayrec.serve import Predictor, export

COUNTS = (1, 64, 512)


def requests_of(predictor: Predictor) -> dict[str, Callable[[], Any]]:
    """Return the requests by name."""
    random = np.random.default_rng(0)
    films = random.integers(1, 1600, LENGTH + max(COUNTS))
    times = 880_000_000 + random.integers(1, 1000, LENGTH).cumsum()
    user = {"past": films[:LENGTH].tolist(), "times": times.tolist(), "seen": []}
    items = [{"item": int(film)} for film in films[LENGTH:]]
    rows = [user | item for item in items]
    torch.testing.assert_close(
        predictor.predict_candidates(user, items), predictor.predict(rows), rtol=1e-5, atol=3e-5
    )
    asked: dict[str, Callable[[], Any]] = {
        f"{count} candidates": lambda count=count: predictor.predict_candidates(user, items[:count])
        for count in COUNTS
    }
    return asked | {f"{len(rows)} rows": lambda: predictor.predict(rows)}


def measure(run: str, rounds: int) -> dict[str, Any]:
    """Return the CPU milliseconds of each request, and their ratio to one candidate."""
    with tempfile.TemporaryDirectory() as folder:
        export(checkpoint_path("RUN", f"{run}@latest"), Path(folder, "a"), types="fp32")
        asked = requests_of(Predictor.load(Path(folder, "a")))
        times: dict[str, list[float]] = {name: [] for name in asked}
        for _ in range(rounds):
            for name, request in asked.items():
                start = time.process_time()
                request()
                times[name].append(1e3 * (time.process_time() - start))
    first = times[f"{COUNTS[0]} candidates"]
    return {
        name: {
            "ms": quartiles(own),
            "ratio": quartiles([one / base for one, base in zip(own, first, strict=True)]),
        }
        for name, own in times.items()
    }


def main() -> None:
    """Measure every run, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    lines = ["| run | request | ms | times one candidate |", "|---|---|---|---|"]
    for run in args.runs:
        results[Path(run).name] = found = measure(run, args.rounds)
        for name, own in found.items():
            lines.append(
                f"| {Path(run).name} | {name} | {own['ms']['median']:.2f} | "
                f"{own['ratio']['median']:.2f} |"
            )
    lines.append(f"\nCPU time of one thread, medians of {args.rounds} rounds.")
    report.show("candidates", results, lines)


if __name__ == "__main__":
    main()
