"""Shuffled rows of two list columns from Parquet to batches, beside bare pyarrow, in turns.

    python -m benchmarks.reading [--rows 200000] [--length 38] [--rounds 7]

A row has a label and two lists of int64 ids, of 0 to twice the length: a history and what lies
beside it. "rayrec, shuffled" walks an epoch of the loader, whose rows are shuffled by blocks,
checked and joined to batches; "rayrec, in order" leaves the shuffling out. "pyarrow" reads the same
columns one row group after the other, on one thread, cuts batches of them and hands values and
offsets of each to torch; nothing is shuffled or checked. All have one rank and read the same file,
which the page cache holds. Times are CPU time of all threads, so that a busy machine stretches them
little. The mark is 150,000 shuffled rows a second of CPU time.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import report
from benchmarks.workload import quartiles
from rayrec.data import FeatureSchema, ParquetDataset
from rayrec.machine.memory import tune_malloc

COLUMNS, IDS, GROUP_ROWS = ("past", "beside"), 100_000, 16_384
SHUFFLED, PYARROW = "rayrec, shuffled", "pyarrow"
MARK = 150_000


def write_rows(folder: Path, rows: int, length: int) -> FeatureSchema:
    """Write one file of row groups, and return its schema."""
    rng = np.random.default_rng(0)
    arrays: dict[str, pa.Array] = {"label": pa.array(rng.integers(0, 2, rows).astype(np.float32))}
    features, tables = [], []
    for name in COLUMNS:
        lengths = rng.integers(0, 2 * length + 1, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = pa.array(rng.integers(0, IDS, offsets[-1]))
        arrays[name] = pa.ListArray.from_arrays(pa.array(offsets), ids)
        features.append({"name": name, "column": name})
        table = {"name": f"t_{name}", "num_embeddings": IDS, "embedding_dim": 16}
        tables.append({**table, "pooling": "none", "features": [name]})
    pq.write_table(pa.table(arrays), folder / "part-0.parquet", row_group_size=GROUP_ROWS)
    schema = json.dumps({"label": "label", "features": features, "tables": tables})
    return FeatureSchema.from_json(schema, "the benchmark's schema")


def by_loader(folder: Path, schema: FeatureSchema, batch_rows: int, shuffle: bool) -> int:
    """Walk an epoch of the loader; returns its rows."""
    data = ParquetDataset(str(folder), schema)
    return sum(len(batch.labels) for batch in data.loader(0, 1, batch_rows, shuffle=shuffle))


def by_pyarrow(folder: Path, batch_rows: int) -> int:
    """Read the same columns in order; returns their rows."""
    rows = 0
    with pq.ParquetFile(folder / "part-0.parquet") as file:
        for batch in file.iter_batches(batch_rows, columns=["label", *COLUMNS], use_threads=False):
            label, *lists = batch.columns
            # copies, since torch takes no memory that is read-only
            tensors = [torch.from_numpy(label.to_numpy(zero_copy_only=False).copy())]
            for column in lists:
                for array in (column.flatten(), column.offsets):
                    tensors.append(torch.from_numpy(array.to_numpy().copy()))
            rows += len(tensors[0])
    return rows


def main() -> None:
    """Read in turns, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--length", type=int, default=38, help="mean length of a list")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        schema = write_rows(folder, args.rows, args.length)
        ways: dict[str, Callable[[], int]] = {
            SHUFFLED: lambda: by_loader(folder, schema, args.batch, shuffle=True),
            "rayrec, in order": lambda: by_loader(folder, schema, args.batch, shuffle=False),
            PYARROW: lambda: by_pyarrow(folder, args.batch),
        }
        for number in range(args.rounds + 1):
            for name in list(ways)[:: -1 if number % 2 else 1]:
                start = time.process_time()
                rows = ways[name]()
                seconds = time.process_time() - start
                assert rows == args.rows, f"{name} gave {rows} rows"
                if number:  # the first round fills caches
                    speeds.setdefault(name, []).append(rows / seconds)
    lines = [
        "| path | rows a CPU second, median (quartiles) | of pyarrow's | mark |",
        "|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for name in ways:
        speed = quartiles(speeds[name])
        pairs = zip(speeds[PYARROW], speeds[name], strict=True)
        ratio = quartiles([base / own for base, own in pairs])
        results[name] = {"rows_per_cpu_s": speed, "ratio": ratio}
        spread = f"{speed['median']:,.0f} ({speed['p25']:,.0f} to {speed['p75']:,.0f})"
        mark = f"{MARK:,}" if name == SHUFFLED else ""
        lines.append(f"| {name} | {spread} | {1 / ratio['median']:.2f} | {mark} |")
    lines.append(
        f"\n{args.rows:,} rows of {len(COLUMNS)} lists of {args.length} ids on average, row groups "
        f"of {GROUP_ROWS:,} rows, batches of {args.batch:,}; CPU time of all threads of one "
        f"process, medians of {args.rounds} rounds in which the ways take turns."
    )
    report.show("reading", results, lines)


if __name__ == "__main__":
    main()
