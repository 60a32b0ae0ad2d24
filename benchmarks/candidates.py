"""One user with many candidates: the history is encoded once, whatever their number.

    python -m benchmarks.candidates RUN [RUN ...] [--rounds 30]

Exports runs of `benchmarks.next_item --work DIR` (DIR/0/HSTU-sampled-softmax and the like), or of
ranking models such as DIN, as fp32, and asks for the scores of 1, 64 and 512 candidates of one
history of 50 events, and for those of 512 rows with a candidate each. The ids are random, by the
schema; those of a history are cut as the run's. The requests take turns in each round. A row says
the median over the rounds of the CPU time, which a busy machine stretches less than the wall, and
its ratio to that of one candidate. All are compared with the scores of the rows first.
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
from rayrec.layout import EmbeddingConfig
from rayrec.serve import Predictor, export

COUNTS = (1, 64, 512)


def requests_of(predictor: Predictor) -> dict[str, Callable[[], Any]]:
    """Return the requests by name."""
    random, schema, recipe = np.random.default_rng(0), predictor.schema, predictor.manifest.recipe
    assert schema is not None and recipe is not None
    scorer = predictor.weights.scorer
    once = None if scorer is None else scorer.user_once(are_bags=False)
    items_of = {"item"} if once is None else once.candidates
    user: dict[str, Any] = {"times": 880_000_000 + random.integers(1, 1000, LENGTH).cumsum()}
    own: dict[str, Any] = {}
    for table in schema.tables:
        is_list = isinstance(table, EmbeddingConfig)
        for name in table.feature_names:
            side, count = (own, max(COUNTS)) if name in items_of else (user, LENGTH)
            ids = random.integers(1, table.num_embeddings, count)
            side[name] = ids if side is own or is_list else ids[0]
    for one in schema.sequences:
        if one.name not in user:
            is_list = one.most_recent is not None or one.aligned_with is not None
            user[one.name] = [] if is_list else user["times"][-1]
    columns = {feature.name: feature.column for feature in schema.features}
    user |= {dense.column: 0.5 for dense in schema.dense}
    user = {columns.get(k, k): getattr(v, "tolist", lambda v=v: v)() for k, v in user.items()}
    items = [
        {columns[name]: int(ids[place]) for name, ids in own.items()}
        for place in range(max(COUNTS))
    ]
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
