"""A small run as the driver tells it to a callback, its metrics' names, and W&B's files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from rayrec.driver.ray_metrics import METRICS
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, Topology
from rayrec.planner import EmbeddingShardingPlanner
from rayrec.train.callbacks import Callback, RunInfo
from rayrec.train.events import (
    Evaluation,
    Failure,
    Noticed,
    ProgressReport,
    Recovered,
    Resized,
    Saved,
    StreamProgress,
)

WINDOW = 50  # steps
BLOCK = 32 * 1024  # bytes, of a W&B file
IDS = ["rows", "held", "candidates", "looked_up", "unknown", "admitted", "evicted", "refused"]
PARTS = {"data": 0.001, "input": 0.002, "lookup": 0.004, "dense": 0.003, "update": 0.002}


def planned(ranks: int = 2) -> ShardingPlan:
    """A plan with prices of two tables."""
    tables = [
        EmbeddingBagConfig(100_000, 16, name="user", feature_names=["user"]),
        EmbeddingBagConfig(50, 8, name="day", feature_names=["day"]),
    ]
    return EmbeddingShardingPlanner(Topology.local(ranks), batch_size=512).plan(tables)


def info(steps: int, first: int = 0, name: str = "a", ranks: int = 2) -> RunInfo:
    """The start of a life."""
    plan = planned(ranks)
    assert plan.estimates is not None
    return RunInfo(
        name=name,
        run_path=f"/runs/{name}",
        steps=steps,
        first_step=first,
        world_size=ranks,
        hosts=("10.0.0.1",) * ranks,
        plan=plan,
        predicted=plan.estimates.ranks,
        settings={"global_batch_size": 1024, "seed": 3},
    )


def report(step: int, rate: float = 0.5, ranks: int = 2) -> ProgressReport:
    """The window that ends at a step; the loss falls with the steps."""
    loss = 0.4 + rate / math.sqrt(step)
    return ProgressReport(
        step=step,
        rows=step * 1024,
        rows_per_s=90_000.0 + 1_000 * (step // WINDOW % 7),
        loss=loss,
        auc=1.0 - loss / 2,
        ne=loss / 0.5,
        data_wait=tuple(0.01 * (rank + 1) for rank in range(ranks)),
        scores={"click/auc": 1.0 - loss / 2, "buy/auc": 1.0 - loss / 3},
        learning_rates={"sparse": 0.05, "dense": 1e-3},
        memory_bytes=tuple(2_000_000_000 + 100_000_000 * rank for rank in range(ranks)),
        step_s=PARTS,
        ids={"user": dict(zip(IDS, (800, 200 + step, 50, 100, 40, 30, 20, 10), strict=True))},
    )


def tell(
    callback: Callback,
    steps: int,
    first: int = 0,
    *,
    until: int | None = None,
    error: BaseException | None = None,
    name: str = "a",
    rate: float = 0.5,
    ranks: int = 2,
    lost_at: int | None = None,
) -> None:
    """Tell a callback of a life that ends at step `until`, by default the last.

    It evaluates and saves every fourth window, and at the end where there is no error. After the
    window that ends at `lost_at`, rank 1 is lost, and that window is told once more.
    """
    callback.on_start(info(steps, first, name, ranks))
    last = steps if until is None else until
    for step in range(first + WINDOW, last + 1, WINDOW):
        callback.on_step(step - 1)
        callback.on_window(report(step, rate, ranks))
        if step == lost_at:
            lost = {"rank": 1, "host": "10.0.0.2", "cause": "its process died"}
            callback.on_stream(StreamProgress(step=step, window=3, rows=900, cut_s=1.8e9))
            callback.on_notice(
                Noticed(step=step, host="10.0.0.2", ranks=(1,), seconds=30.0, answer="save")
            )
            callback.on_failure(Failure(step=step, pause_s=1.0, **lost))
            back = {"step": step - WINDOW, "path": None, "failed_step": step, "seconds": 2.5}
            callback.on_recovery(Recovered(**lost, **back, replaced=False, dropped=True))
            fewer = Resized(
                step=step - WINDOW, ranks_before=ranks, ranks=ranks - 1, lost=True, seconds=0.0
            )
            callback.on_resize(fewer)
            callback.on_window(report(step, rate, ranks))
        ended = step == last and error is None
        if step % (4 * WINDOW) == 0 or ended:
            scores = {"auc": 0.9 - rate / math.sqrt(step), "logloss": 0.4 + rate / math.sqrt(step)}
            callback.on_evaluation(
                Evaluation(step=step, scores=scores, rows=2_000, seconds=0.5, final=ended)
            )
            path = f"/runs/{name}/step-{step:08d}"
            callback.on_checkpoint(Saved(step=step, path=path, seconds=0.25, best=ended))
    callback.on_end(error)


def exported(name: str) -> str:
    """The name under which Prometheus finds a metric of `METRICS`."""
    return f"ray_{name}_total" if METRICS[name].kind == "counter" else f"ray_{name}"


def wandb_records(folder: Path) -> list[Any]:
    """The records of the one offline run below a folder.

    The file has a header of 7 bytes, then blocks of 32 KiB with pieces of records: a checksum of 4
    bytes, the length in 2, and whether it is a whole record (1), its first, middle or last piece.
    """
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.rglob("run-*.wandb")
    data, at, piece, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(piece))
            piece = b""
    return records


def wandb_curve(records: list[Any], name: str) -> dict[int, float]:
    """Step -> value of a name in the records of a W&B run."""
    curve = {}
    for record in records:
        items = record.history.item
        row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
        if name in row:
            curve[row["_step"]] = row[name]
    return curve
