"""Small real files and the plain-Python reading of them that tests compare with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from rayrec.data.batch import Batch
from rayrec.layout.schema import FeatureSchema

SCHEMA = FeatureSchema.from_json(
    json.dumps(
        {
            "label": "label",
            "dense": ["row", {"column": "d1", "fill": -1.0}],
            "features": [
                {"name": "user", "column": "user"},
                {"name": "genres", "column": "genres"},
            ],
            "tables": [
                {
                    "name": "t_user",
                    "num_embeddings": 1000,
                    "embedding_dim": 4,
                    "features": ["user"],
                },
                {
                    "name": "t_genre",
                    "num_embeddings": 20,
                    "embedding_dim": 4,
                    "pooling": "mean",
                    "features": ["genres"],
                },
            ],
        }
    )
)


def random_table(rng: random.Random, rows: int, first_row: int = 0) -> pa.Table:
    """Rows that number themselves in the dense column 'row', so that a batch tells which rows it
    holds.
    """
    genres = [
        None if rng.random() < 0.1 else [rng.randrange(20) for _ in range(rng.randrange(4))]
        for _ in range(rows)
    ]
    return pa.table(
        {
            "unused": pa.array([str(i) for i in range(rows)], pa.string()),
            "label": pa.array([rng.randrange(2) for _ in range(rows)], pa.int32()),
            "row": pa.array(range(first_row, first_row + rows), pa.int64()),
            "d1": pa.array(
                [None if rng.random() < 0.2 else rng.random() for _ in range(rows)], pa.float64()
            ),
            "user": pa.array(
                [None if rng.random() < 0.1 else rng.randrange(1000) for _ in range(rows)],
                pa.int64(),
            ),
            "genres": pa.array(genres, pa.list_(pa.int64())),
        }
    )


def write_files(
    folder: Path, rng: random.Random, kind: str, sizes: tuple[int, ...], chunk: int = 50
) -> pa.Table:
    """One file per size; returns all rows in file order."""
    folder.mkdir(parents=True, exist_ok=True)
    tables, first = [], 0
    for i, rows in enumerate(sizes):
        table = random_table(rng, rows, first)
        if kind == "parquet":
            pq.write_table(table, folder / f"part-{i:03}.parquet", row_group_size=chunk)
        else:
            compression = rng.choice((None, "lz4", "zstd"))
            with ipc.new_file(
                folder / f"part-{i:03}.arrow",
                table.schema,
                options=ipc.IpcWriteOptions(compression=compression),
            ) as out:
                out.write_table(table, max_chunksize=chunk)
        tables.append(table)
        first += rows
    return pa.concat_tables(tables)


def batch_rows(batch: Batch) -> list[tuple]:
    """(label, dense..., bags..., weights...) of every row, as plain Python; weights only where the
    batch has them.
    """
    out = []
    kjt, n = batch.sparse_features, batch.rows
    offsets, values = kjt.offsets().tolist(), kjt.values().tolist()
    weights = None if kjt.weights_or_none() is None else kjt.weights().tolist()
    assert kjt.stride() == n and len(offsets) == len(kjt.keys()) * n + 1
    for i in range(n):
        spans = [(offsets[f * n + i], offsets[f * n + i + 1]) for f in range(len(kjt.keys()))]
        bags = [tuple(values[a:b]) for a, b in spans]
        extra = [] if weights is None else [tuple(weights[a:b]) for a, b in spans]
        out.append((batch.labels[i].item(), *batch.dense_features[i].tolist(), *bags, *extra))
    return out
