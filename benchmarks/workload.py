"""The workload of the step benchmarks: Criteo-shaped tables and ragged Zipf batches, the same for
every system under test.

Cardinalities are those of the 26 categorical columns of the Criteo Kaggle display-advertising set,
capped. Ids follow a bounded Zipf law whose hot rows are scattered over the table by a fixed
multiplication, so that neighbours in popularity are not neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One case: tables and batch shape.

    Attributes:
        dim: embedding_dim of every table.
        pooling: ids per bag, constant.
        batch: rows of the global batch.
        cap: rows of the largest table.
        zipf: exponent of the id distribution.
        sizes: rows of every table, in place of the Criteo set's.
    """

    dim: int = 64
    pooling: int = 1
    batch: int = 2048
    cap: int = 1_000_000
    tables: int = 26
    zipf: float = 1.05
    lr: float = 0.02
    sizes: tuple[int, ...] | None = None

    @property
    def rows(self) -> list[int]:
        """num_embeddings of every table."""
        if self.sizes is not None:
            return list(self.sizes)
        return [max(10, min(self.cap, CRITEO_ROWS[i % 26])) for i in range(self.tables)]

    @property
    def keys(self) -> list[str]:
        """Feature names, one per table."""
        return [f"f{i}" for i in range(self.tables)]

    def batches(
        self, rank: int, world_size: int, count: int, seed: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`count` local batches as (ids (N,) int64, lengths (F * B,) int32), key-major."""
        rng = np.random.default_rng(seed * 1000 + rank)
        local = self.batch // world_size
        return [self._batch(rng, local) for _ in range(count)]

    def _batch(self, rng: np.random.Generator, local: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = np.concatenate(
            [zipf_ids(rng, rows, local * self.pooling, self.zipf) for rows in self.rows]
        )
        return torch.from_numpy(ids), torch.full(
            (self.tables * local,), self.pooling, dtype=torch.int32
        )


def zipf_ids(rng: np.random.Generator, rows: int, count: int, alpha: float) -> np.ndarray:
    """(count,) int64 ids in [0, rows): a bounded Pareto by inverse transform, scattered by a fixed
    odd multiplier.
    """
    exponent = 1 - alpha
    uniform = rng.random(count)
    popularity = (
        ((uniform * ((rows + 1.0) ** exponent - 1) + 1) ** (1 / exponent) - 1)
        .astype(np.int64)
        .clip(0, rows - 1)
    )
    return (popularity * 2654435761 + 12345) % rows


def bytes_floor(work: Workload) -> int:
    """Bytes that one global step must move for lookup, pooling and a fused row-wise Adagrad update,
    without any reuse of rows.
    """
    ids, out, width = work.batch * work.pooling, work.batch, work.dim * 4
    per_table = ids * width + out * width + out * width + 2 * ids * width + 2 * ids * 4
    return per_table * work.tables


def quartiles(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and count of samples."""
    array = np.asarray(sorted(samples))
    q1, median, q3 = np.percentile(array, [25, 50, 75])
    return {
        "median": float(median),
        "p25": float(q1),
        "p75": float(q3),
        "min": float(array[0]),
        "max": float(array[-1]),
        "n": len(array),
    }
