"""What rayrec wants to reach, beside the newest results in `benchmarks/results/`.

    python -m benchmarks.marks

A ratio is of two sides measured in turns in one run. Marks are for two ranks of one thread on two
cores; the speed of an embedding step is against TorchRec's table-wise step, sequences and
replicated tables against TorchRec's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.figures import newest

Results = dict[str, Any]


class Mark(NamedTuple):
    """One line: what is wanted at least, and how to read it from the results of a benchmark."""

    text: str
    benchmark: str
    least: float
    read: Callable[[Results], float]


def shipped(key: str) -> Callable[[Results], float]:
    """Speed against the case's first system."""
    return lambda results: 1 / float(results[key]["ratio"]["median"])


def tuned(key: str) -> Callable[[Results], float]:
    """Speed against the reference with malloc tuned."""
    return lambda results: float(results[key]["to_last_reference"])


def over(slow: str, fast: str) -> Callable[[Results], float]:
    """Median milliseconds of one system over those of another."""
    return lambda results: float(results[slow]["ms"]["median"] / results[fast]["ms"]["median"])


def dynamic(case: str) -> Callable[[Results], float]:
    """Speed of a step of dynamic tables against that of static ones on two ranks."""

    def read(results: Results) -> float:
        return 1 / float(results["step"]["found"][case]["ratio"]["median"])

    return read


STEP = "pooling 1, rayrec "
MARKS = (
    Mark(
        "embedding step, table-wise, 1 id a bag, TorchRec as shipped",
        "step",
        8.0,
        shipped(STEP + "table_wise"),
    ),
    Mark("the same, TorchRec with malloc tuned", "step", 4.0, tuned(STEP + "table_wise")),
    Mark(
        "the same with 10 ids a bag, as shipped",
        "step",
        4.0,
        shipped("pooling 10, rayrec table_wise"),
    ),
    Mark("the same with 10 ids a bag, tuned", "step", 2.5, tuned("pooling 10, rayrec table_wise")),
    *(
        Mark(f"{kind}, 1 id a bag, as shipped", "step", 4.0, shipped(STEP + kind))
        for kind in ("row_wise", "column_wise", "grid", "mixed")
    ),
    Mark(
        "replicated tables, 4 x 1e5 rows",
        "step",
        30.0,
        shipped("data parallel, 4 x 1e5 rows, rayrec data_parallel"),
    ),
    Mark(
        "replicated tables, 2 x 1e6 rows",
        "step",
        30.0,
        shipped("data parallel, 2 x 1e6 rows, rayrec data_parallel"),
    ),
    Mark("sequences, table-wise", "step", 5.0, shipped("sequence, rayrec sequence")),
    Mark("dynamic tables against static ones", "dynamic", 0.8, dynamic("pooled, rayrec dynamic")),
    Mark("the same, sequences", "dynamic", 0.8, dynamic("sequence, rayrec sequence_dynamic")),
    Mark(
        "two ranks against one, the same global batch",
        "step",
        1.0,
        over(STEP + "table_wise, 1 rank", STEP + "table_wise"),
    ),
    Mark(
        "whole DLRM, dense layers of nn.Linear",
        "dlrm",
        1.35,
        shipped("pooling 1, rayrec, plain dense"),
    ),
    Mark("whole DLRM, rayrec's dense layers", "dlrm", 2.0, shipped("pooling 1, rayrec")),
    Mark(
        "through the driver from Parquet, against the bare loop",
        "driver",
        0.95,
        lambda results: float(results["ratio"]["median"]),
    ),
    Mark(
        "from a growing folder, against windows of the same files",
        "streaming",
        0.9,
        lambda results: float(results["ratio"]["median"]),
    ),
    Mark(
        "10 s against the p99 age of the newest event that is served",
        "streaming",
        1.0,
        lambda results: 10 / float(results["staleness"]["p99"]),
    ),
    Mark(
        "Arrow list columns to a batch, of memcpy's speed",
        "data",
        0.6,
        lambda results: 1 / float(results["rayrec, with checks"]["ratio"]["median"]),
    ),
    Mark(
        "two list columns of 38, shuffled, against 150,000 rows a CPU second",
        "reading",
        1.0,
        lambda results: results["rayrec, shuffled"]["rows_per_cpu_s"]["median"] / 150_000,
    ),
    Mark(
        "15% against the embedding's share of a SASRec step",
        "sasrec",
        1.0,
        lambda results: 0.15 / float(results["shares"]["embedding"]["median"]),
    ),
)


def table() -> str:
    """All marks in Markdown; a case that was not measured says so."""
    files = {
        name: newest(name, peer=name in ("step", "dlrm"))
        for name in dict.fromkeys(mark.benchmark for mark in MARKS)
    }
    lines = ["| case | mark | measured | |", "|---|---|---|---|"]
    for mark in MARKS:
        try:
            found = mark.read((files[mark.benchmark] or {"results": {}})["results"])
        except KeyError:
            lines.append(f"| {mark.text} | {mark.least:g}x | | not measured |")
            continue
        lines.append(
            f"| {mark.text} | {mark.least:g}x | {found:.2f}x | "
            f"{'met' if found >= mark.least else 'missed'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
