"""What runs of `rayrec chaos` came to, as a results file: python -m benchmarks.chaos OUT.json...

The files are those of its option --out. The runs of several files are put into one table, each
compared with the run without faults of its own file.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from rayrec.chaos.campaign import Outcome


def main() -> None:
    """Read, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("outcomes", nargs="+", metavar="OUT.json")
    parser.add_argument("--label", help="name of the results file instead of chaos")
    args = parser.parse_args()
    lines: list[str] = []
    results: dict[str, Any] = {"runs": []}
    struck: Counter[str] = Counter()
    moments: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for path in args.outcomes:
        outcome = Outcome.from_json(Path(path).read_text())
        lines += ["", f"{Path(path).stem}:", "", *outcome.table()]
        for run in outcome.runs:
            struck.update(blow.kind for blow in run.blows for _ in blow.pids)
            moments.update(blow.moment for blow in run.blows for _ in blow.pids if blow.moment)
            good = run.is_good(outcome.calm.digests)
            ends["same tables" if good else "other tables" if run.end == "done" else run.end] += 1
            results["runs"].append(asdict(run))
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(struck.items()))
    said = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    head = f"Faults that struck: {counts}. Runs: {said}."
    if moments:
        head += f" Moments: {', '.join(f'{count} {name}' for name, count in moments.items())}."
    results |= {"struck": struck, "moments": moments, "ends": ends}
    report.show("chaos", results, [head, *lines], args.label)


if __name__ == "__main__":
    main()
