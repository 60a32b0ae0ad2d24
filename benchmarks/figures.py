"""The table of figures in docs/performance.md, made from the newest files in `benchmarks/results/`.

    python -m benchmarks.figures [--check]

Every row names a case and a system of one benchmark; a case that the newest file does not hold is
left out. `--check` changes nothing and ends with code 1 where the page says something else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

PAGE = Path(__file__).parents[1] / "docs/performance.md"
BEGIN, END = "<!-- figures: python -m benchmarks.figures -->\n", "<!-- end of figures -->\n"
ROWS = (  # what it says on the page, benchmark, case and system
    ("embedding step, 1 id a bag, `table_wise`", "step", "pooling 1, rayrec table_wise"),
    ("the same, `row_wise`", "step", "pooling 1, rayrec row_wise"),
    ("the same, `column_wise`", "step", "pooling 1, rayrec column_wise"),
    ("the same, a grid of rows and columns", "step", "pooling 1, rayrec grid"),
    ("the same, kinds mixed", "step", "pooling 1, rayrec mixed"),
    ("embedding step, 10 ids a bag, `table_wise`", "step", "pooling 10, rayrec table_wise"),
    ("sequences", "step", "sequence, rayrec sequence"),
    (
        "replicated tables, 4 of 100,000 rows",
        "step",
        "data parallel, 4 x 1e5 rows, rayrec data_parallel",
    ),
    (
        "replicated tables, 2 of 1,000,000 rows",
        "step",
        "data parallel, 2 x 1e6 rows, rayrec data_parallel",
    ),
    ("a whole DLRM, dense layers of `nn.Linear`", "dlrm", "pooling 1, rayrec, plain dense"),
    ("a whole DLRM, rayrec's dense layers", "dlrm", "pooling 1, rayrec"),
)


def newest(name: str, peer: bool = True) -> dict[str, Any] | None:
    """The newest file of a benchmark; with `peer`, of those in which TorchRec took part."""
    found = []
    for path in RESULTS.glob(f"{name}-*cores-*.json"):
        loaded = json.loads(path.read_text())
        if (
            loaded["benchmark"] == name
            and (not peer or "torchrec" in loaded["versions"])
            and path.stem.startswith(f"{name}-{loaded['hardware']}")
        ):
            found.append(loaded)
    return max(found, key=lambda loaded: loaded["date"], default=None)


def table() -> str:
    """The table in Markdown, with where it comes from."""
    files = {name: newest(name) for name in dict.fromkeys(row[1] for row in ROWS)}
    lines = [
        "| 2 ranks, milliseconds a step | rayrec | TorchRec | speed (quartiles) |",
        "|---|---|---|---|",
    ]
    for text, name, key in ROWS:
        results = (files[name] or {}).get("results", {})
        if key in results:
            ms, ratio = results[key]["ms"]["median"], results[key]["ratio"]
            speed = f"{1 / ratio['median']:.1f}x ({1 / ratio['p75']:.1f} to {1 / ratio['p25']:.1f})"
            lines.append(f"| {text} | {ms:.1f} | {ms / ratio['median']:.1f} | {speed} |")
    about = next((f for f in files.values() if f is not None), None)
    source = (
        ""
        if about is None
        else f"\n{about['hardware']}, {about['date']}, TorchRec {about['versions']['torchrec']} as "
        "shipped.\n"
    )
    return "\n".join(lines) + "\n" + source


def main() -> int:
    """Write the table, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    wanted = head + BEGIN + table() + END + rest.split(END, 1)[1]
    if args.check:
        return int(wanted != text)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
