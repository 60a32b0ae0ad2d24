"""Arrow list columns to a Batch: against one memcpy of the same bytes and against a path through
Python lists, interleaved in one run.

    python -m benchmarks.data [--rows 8192] [--columns 26] [--rounds 60]

A batch holds 26 list<int64> columns of 0 to 10 ids, as a Parquet or IPC reader hands them over. The
conversion includes its checks: null lists, null ids and the range of every id. memcpy copies as
many bytes as the batch holds. Both do as ranks do: malloc is tuned, record batches come one after
the other, eight in turn, which no cache holds, and the last four outputs are kept, whose memory is
then used again. "In cache" repeats one batch, which flatters memcpy: no training step leaves its
data in the cache. Times are CPU time of the one thread.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

from benchmarks import report
from benchmarks.workload import quartiles
from rayrec.data import Batch, FeatureSchema
from rayrec.data.convert import to_batch
from rayrec.machine.memory import tune_malloc
from rayrec.sparse import KeyedJaggedTensor

RECORDS = 8


def make(rows: int, columns: int, seed: int = 0) -> tuple[pa.RecordBatch, FeatureSchema]:
    """A record batch of list columns and its schema."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, pa.Array] = {"label": pa.array(rng.integers(0, 2, rows).astype(np.float32))}
    features, tables = [], []
    for i in range(columns):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 11, rows))]).astype(np.int32)
        arrays[f"c{i}"] = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(rng.integers(0, 100_000, offsets[-1]))
        )
        features.append({"name": f"f{i}", "column": f"c{i}"})
        tables.append(
            {
                "name": f"t{i}",
                "num_embeddings": 100_000,
                "embedding_dim": 16,
                "pooling": "sum",
                "features": [f"f{i}"],
            }
        )
    schema = json.dumps({"label": "label", "dense": [], "features": features, "tables": tables})
    return pa.RecordBatch.from_pydict(arrays), FeatureSchema.from_json(
        schema, "the benchmark's schema"
    )


def size_of(batch: Batch) -> int:
    """Bytes of ids and lengths, in whole words."""
    kjt = batch.sparse_features
    return (8 * kjt.values().numel() + 4 * kjt.lengths().numel()) // 8 * 8


def by_lists(batch: pa.RecordBatch, schema: FeatureSchema) -> KeyedJaggedTensor:
    """The same through Python lists."""
    bags = [batch.column(feature.column).to_pylist() for feature in schema.features]
    ids = torch.tensor([i for column in bags for bag in column for i in bag])
    lengths = torch.tensor([len(bag) for column in bags for bag in column], dtype=torch.int32)
    return KeyedJaggedTensor([feature.name for feature in schema.features], ids, lengths=lengths)


def main() -> None:
    """Time, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()
    made = [make(args.rows, args.columns, seed) for seed in range(RECORDS)]
    schema, records = made[0][1], [record for record, _ in made]
    sources = [np.ones(size_of(to_batch(record, schema)) // 8, np.int64) for record in records]
    systems: dict[str, tuple[Callable[[int], object], int]] = {
        "memcpy of the same bytes": (lambda i: sources[i % RECORDS].copy(), 20),
        "rayrec, with checks": (lambda i: to_batch(records[i % RECORDS], schema), 20),
        "memcpy, in cache": (lambda i: sources[0].copy(), 20),
        "rayrec, in cache": (lambda i: to_batch(records[0], schema), 20),
        "to_pylist": (lambda i: by_lists(records[0], schema), 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(args.rounds):
        for name, (run, repeats) in systems.items():
            kept = deque[object](maxlen=1 if "in cache" in name else 4)
            start = time.process_time()
            for i in range(repeats):
                kept.append(run(i))
            seconds[name].append((time.process_time() - start) / repeats)
            kept.clear()
    size = 8 * float(np.mean([len(source) for source in sources]))
    lines = [
        "| path | CPU ms per batch, median (quartiles) | GB/s | time against memcpy |",
        "|---|---|---|---|",
    ]
    results = {}
    for name, times in seconds.items():
        base = seconds["memcpy, in cache" if "in cache" in name else "memcpy of the same bytes"]
        ms, ratio = (
            quartiles([1e3 * t for t in times]),
            quartiles([a / b for a, b in zip(times, base, strict=True)]),
        )
        results[name] = {"ms": ms, "ratio": ratio}
        spread = f"{ms['median']:.2f} ({ms['p25']:.2f} to {ms['p75']:.2f})"
        lines.append(
            f"| {name} | {spread} | {size / ms['median'] / 1e6:.2f} | {ratio['median']:.2f}x |"
        )
    lines.append(f"\n{args.rows} rows, {args.columns} columns, {size / 1e6:.1f} MB.")
    report.show("data", results, lines)


if __name__ == "__main__":
    main()
