"""What a stream costs training, and how old a served event is.

    python -m benchmarks.streaming [--rows 100000] [--files 50] [--rounds 5] [--seconds 120]

Speed: one process trains a DLRM on the same rows, in turns as a stream from each source, as windows
in time of Parquet files, and as plain files. All but the last score each of ten windows before they
train on it. The ratios are of neighbours in time, a stream over the windows of the files; the order
changes from round to round. A source whose library is absent is left out, and so is a topic of
Kafka that the mock broker does not hold: 60,000 rows of 8 columns fit.

Staleness: a producer puts a file of rows into a folder every half second, at half of the rows/s of
the stream above or at --rate; a process trains, and publishes every 5 s; a server follows. What its
metric says of the newest event that was trained on is asked ten times a second.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import report
from benchmarks.kafka_topics import topics
from benchmarks.workload import quartiles
from rayrec.data import TimeWindows, WindowedDataset
from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import write_synthetic
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.layout.schema import FeatureSchema
from rayrec.machine.memory import tune_malloc
from rayrec.planner import manual_plan
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.streams import DeltaConfig, IcebergConfig, StreamConfig, StreamDataset
from rayrec.train import CheckpointConfig, RankTrainer, TrainSpec
from rayrec.train.config import ENDLESS

FILES_SIDES = ("windows", "files")
BATCH, WINDOWS = 2048, 10
PER_S = 100  # rows of a second of the data
PUT_S, WARM_S = 0.5, 20.0
METRIC = re.compile(r"^rayrec_serve_event_staleness_seconds (\S+)$", re.M)


def make(folder: Path, rows: int, columns: int = 26, files: int = 50) -> FeatureSchema:
    """Write the rows as files of a stream, each with the time of its events."""
    config = SyntheticConfig(
        rows_train=rows, rows_eval=10, num_features=columns, num_dense=max(1, columns // 2)
    )
    made = write_synthetic(folder / "made", config)
    table = pa.concat_tables(map(pq.read_table, sorted(made.train.glob("*.parquet"))))
    table = table.append_column("at", pa.array(np.arange(len(table)) // PER_S))
    (folder / "in").mkdir()
    size = -(-len(table) // files)
    for k in range(files):
        pq.write_table(table.slice(k * size, size), folder / "in" / f"part-{k:05d}.parquet")
    return FeatureSchema.load(made.schema)


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sources that this machine can read, with what chooses them, filled with rows."""
    found: dict[str, dict[str, Any]] = {"folder": {"folder": str(folder / "in")}}
    parts = [pq.read_table(path) for path in sorted((folder / "in").glob("*.parquet"))]
    with suppress(ImportError):
        from deltalake import write_deltalake

        for part in parts:
            write_deltalake(folder / "delta", part, mode="append")
        found["delta"] = {"delta": DeltaConfig(table=str(folder / "delta"))}
    with suppress(ImportError):
        from pyiceberg.catalog import load_catalog

        place = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": str(folder)}
        catalog = load_catalog("default", **place)
        catalog.create_namespace("shop")
        table = catalog.create_table("shop.clicks", parts[0].schema)
        for part in parts:
            table.append(part)
        found["iceberg"] = {"iceberg": IcebergConfig(table="shop.clicks", properties=place)}
    return found


def train(
    folder: Path,
    schema: FeatureSchema,
    rows: int,
    side: str,
    source: dict[str, Any] | None,
    turn: int,
) -> float:
    """Return the rows/s of a whole run over all rows."""
    recipe = ModelRecipe(model="dlrm", schema=schema.to_json())
    plan = manual_plan(find_tables(recipe), "row_wise", Topology.local(1))
    files, window = open_data(str(folder / "in"), schema.to_json()), rows // WINDOWS
    spec = TrainSpec(
        model=recipe,
        data=files,
        plan=plan,
        global_batch_size=BATCH,
        steps=-(-rows // BATCH),
        checkpoint=CheckpointConfig(at_end=False),
    )
    steps = WINDOWS * -(-window // BATCH)
    if side == "windows":
        cut = WindowedDataset(files, TimeWindows(column="at", size=window // PER_S))
        spec = replace(spec, data=cut, steps=steps)
    if source is not None:
        config = StreamConfig(**source, rows=window, seconds=5.0, stop_after_windows=WINDOWS)
        data = StreamDataset(config=config, schema=schema)
        path = str(folder / f"run-{side}-{turn}".replace(" ", "-"))
        spec = replace(spec, data=data, steps=ENDLESS, run_path=path)
    with RankTrainer(spec) as trainer:
        began = time.perf_counter()
        trainer.run()
        assert side == "files" or trainer.step == steps
        return rows / (time.perf_counter() - began)


def speeds(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the rows/s of each side, round by round."""
    schema = make(folder, args.rows, args.columns, args.files)
    with topics(folder / "in") as kafka:
        streams = sources(folder) | {name: {"kafka": one} for name, one in kafka.items()}
        sides = (*streams, *FILES_SIDES)
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(args.rounds + 1):
            for side in sides if turn % 2 else sides[::-1]:
                speed = train(folder, schema, args.rows, side, streams.get(side), turn)
                if turn:  # the first warms up
                    taken[side].append(speed)
                print(f"round {turn}, {side}: {speed:,.0f} rows/s", flush=True)
    return taken


def staleness(folder: Path, rate: float, seconds: float) -> list[float]:
    """Return the ages of the newest event that the server tells, ten a second."""
    made, incoming = folder / "made", folder / "live"
    incoming.mkdir()
    rows = pa.concat_tables(map(pq.read_table, sorted((made / "train").glob("*.parquet"))))
    keys = [f"data.schema={made}/schema.json", f"data.stream.folder={incoming}"]
    keys += ["data.stream.time=at", "data.stream.rows=1000000", "data.stream.seconds=1.0"]
    keys += [f"run.storage_path={folder}/runs", "run.name=live", "run.publish.every_s=5.0"]
    keys += [f"run.global_batch_size={BATCH}", "run.report_every_s=0.5", "run.progress=off"]
    command = [sys.executable, "-m", "rayrec.cli.main"]
    words = [*command, "train", "--local", *(w for key in keys for w in ("--set", key))]
    serve = [*command, "serve", "--follow", f"{folder}/runs/live", "--replicas", "1"]
    serve += ["--poll", "0.2", "--port", "0"]
    ages: list[float] = []
    started = [subprocess.Popen(words, stdout=subprocess.DEVNULL)]
    try:
        count, number, port = max(1, int(rate * PUT_S)), 0, None
        began: float | None = None
        while began is None or time.monotonic() - began < WARM_S + seconds:
            assert all(process.poll() is None for process in started)
            due = time.monotonic() + PUT_S
            part = rows.slice(number * count % max(1, len(rows) - count), count)
            now = pa.array(np.full(len(part), int(time.time())))
            aside = incoming / f"_part-{number:06d}.parquet"
            pq.write_table(part.append_column("at", now), aside)
            aside.rename(incoming / f"part-{number:06d}.parquet")
            number += 1
            if port is None and list((folder / "runs" / "live" / "published").glob("base-*")):
                started.append(subprocess.Popen(serve, stdout=subprocess.PIPE, text=True))
                said = started[-1].stdout
                assert said is not None
                port = int(said.readline().rpartition(":")[2])
                began = time.monotonic()
            while time.monotonic() < due:
                if began is not None and time.monotonic() - began > WARM_S:
                    ages += asked(f"http://127.0.0.1:{port}/metrics")
                time.sleep(0.1)
    finally:
        for process in reversed(started):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
    return ages


def asked(url: str) -> list[float]:
    """Return the age that a server tells now."""
    with urllib.request.urlopen(url, timeout=30) as said:
        return [float(age) for age in METRIC.findall(said.read().decode())]


def main() -> None:
    """Measure both, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=50, help="and versions and snapshots")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--columns", type=int, default=26, help="of ids; half as many of numbers")
    parser.add_argument("--seconds", type=float, default=120.0, help="of asking for staleness")
    parser.add_argument("--rate", type=float, help="rows/s of the producer")
    parser.add_argument("--label", help="name of the results file instead of streaming")
    args = parser.parse_args()
    tune_malloc()
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as made:
        taken = speeds(args, Path(made))
        rate = args.rate or quartiles(taken["folder"])["median"] / 2
        loads.append(os.getloadavg()[0])
        ages = staleness(Path(made), rate, args.seconds)
    loads.append(os.getloadavg()[0])
    ratios = {
        side: quartiles([a / b for a, b in zip(values, taken["windows"], strict=True)])
        for side, values in taken.items()
        if side not in FILES_SIDES
    }
    p50, p99 = (float(np.percentile(ages, q)) for q in (50, 99))
    lines = ["| | rows/s: median (min to max) |", "|---|---|"]
    for side, values in taken.items():
        own = quartiles(values)
        lines.append(f"| {side} | {own['median']:,.0f} ({own['min']:,.0f} to {own['max']:,.0f}) |")
    lines += ["", "| stream from | over windows of files: median (min to max) |", "|---|---|"]
    for side, ratio in ratios.items():
        spread = f"({ratio['min']:.2f} to {ratio['max']:.2f})"
        lines.append(f"| {side} | {ratio['median']:.2f} {spread} |")
    lines += [
        "",
        f"Event to server at {rate:,.0f} rows/s, {len(ages)} answers: median {p50:.1f} s, p99 "
        f"{p99:.1f} s.",
        f"{args.rows // args.files:,} rows a file, version or snapshot. Load of the machine of "
        f"{os.cpu_count()} cores: {loads}.",
    ]
    results: dict[str, Any] = {
        "rows/s": taken,
        "ratio": ratios,
        "staleness": {"rate": rate, "answers": len(ages), "p50": p50, "p99": p99},
        "load": loads,
    }
    report.show("streaming", results, lines, args.label)


if __name__ == "__main__":
    main()
