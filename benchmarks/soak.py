"""What a run of hours takes: memory, open files and disk of a stream at a steady rate.

    python -m benchmarks.soak [--minutes 120] [--rate 10000] [--folder DIR]

A producer puts a file of rows into a folder every half second and deletes those of five minutes
ago. Ids are born and die (`rayrec.data.planted`), the tables are dynamic, and the truth is known,
so each window has a best AUC. `rayrec train` trains on two ranks of a Ray cluster, saves and
publishes by the clock, and a server follows. Twice a minute the processes' memory without that of
files, which others map as well, their open files, and the sizes of folders are taken. What is
reported is the mean of each quarter of the time behind the first 20 minutes, and, where matplotlib
is installed, a picture of the curves.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import report
from rayrec.data.planted import CHUNK, Planted, SyntheticConfig
from rayrec.data.synthetic import TRUE_LOGIT

WORLD = SyntheticConfig(
    num_features=8, num_lists=0, num_dense=4, cap=20_000, lifetime=2_000_000, dim=16
)
PUT_S, SAMPLE_S, KEPT_S, SETTLED_MIN, PARTS = 0.5, 30.0, 300.0, 20.0, 4
PORT = 8599
TOLD = ("at", "step", "rows", "lag_s", "refused", "late", "best_auc")
KINDS = ("ranks", "driver", "Ray's servers", "other actors")
METRIC = re.compile(r"^rayrec_serve_event_staleness_seconds (\S+)$", re.M)
RUN = {
    "data.stream.truth": TRUE_LOGIT,
    "data.stream.time": "at",
    "data.stream.rows": 500_000,
    "data.stream.seconds": 5.0,
    "model.model": "dlrm",
    "scaling.num_workers": 2,
    "run.global_batch_size": 2048,
    "run.name": "soak",
    "run.progress": "off",
    "run.shuffle": "false",
    "run.checkpoint.every_s": 30.0,
    "run.checkpoint.num_to_keep": 2,
    "run.publish.every_s": 10.0,
    "run.publish.full_every": 30,
    "run.publish.num_to_keep": 2,
}


def produce(folder: Path, rate: float) -> None:
    """Put files into the folder until the process is ended; memory is a few chunks."""
    planted, count = Planted(WORLD), max(1, int(rate * PUT_S))
    index, number, waiting = 0, 0, pa.table({})
    due = time.monotonic()
    while True:
        while len(waiting) < count:
            chunk = planted.chunk(0, index, CHUNK)
            index += 1
            columns = {"label": pa.array(chunk.labels), TRUE_LOGIT: pa.array(chunk.logits)}
            columns |= {f"d_{i}": pa.array(chunk.dense[:, i]) for i in range(WORLD.num_dense)}
            columns |= {f"cat_{f}": pa.array(ids.values) for f, ids in enumerate(chunk.ids)}
            made = pa.table(columns)
            waiting = made if not len(waiting) else pa.concat_tables([waiting, made])
        part, waiting = waiting.slice(0, count), waiting.slice(count)
        time.sleep(max(0.0, due - time.monotonic()))
        due += PUT_S
        now = pa.array(np.full(count, int(time.time())))
        aside = folder / f"_part-{number:08d}.parquet"
        pq.write_table(part.append_column("at", now), aside)
        aside.rename(folder / f"part-{number:08d}.parquet")
        number += 1
        old = number - int(KEPT_S / PUT_S)
        if old >= 0:
            (folder / f"part-{old:08d}.parquet").unlink(missing_ok=True)


def processes(root: int) -> dict[int, str]:
    """Return the processes below one, with their command lines."""
    parents, lines = dict[int, int](), dict[int, str]()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            pid = int(path.name)
            parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            lines[pid] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    found, grown = {root}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} | found
        found, grown = more, len(more) > len(found)
    return {pid: lines.get(pid, "") for pid in found}


def kind_of(line: str) -> str:
    """Return which of `KINDS` a process of the training is of."""
    if line.startswith("ray::"):
        return "ranks" if "Rank" in line else "other actors"
    return "driver" if "rayrec.cli.main train" in line else "Ray's servers"


def taken(trees: dict[str, int]) -> dict[str, float]:
    """Return memory in MB and open files of each part of the run."""
    found: dict[str, float] = {}
    for name, root in trees.items():
        for pid, line in processes(root).items():
            kind = kind_of(line) if name == "train" else name
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                pss = next(int(text.split()[1]) for text in lines if text.startswith("Pss_Anon:"))
                files = len(os.listdir(f"/proc/{pid}/fd"))
                found[f"{kind}, MB"] = found.get(f"{kind}, MB", 0.0) + pss / 1024
                found[f"{kind}, files"] = found.get(f"{kind}, files", 0.0) + files
    return found


def disk(folder: Path) -> dict[str, float]:
    """Return the MB and the number of files of a run's folder, by its parts."""
    found = {"folder, MB": 0.0, "folder, files": 0.0}
    for place, _, names in os.walk(folder):  # passes over what is deleted meanwhile
        for name in names:
            path = Path(place, name)
            top = path.relative_to(folder).parts[0]
            part = "checkpoints" if top.startswith("step-") else top
            with suppress(OSError):
                size = path.stat().st_size / 1e6
                found["folder, MB"] += size
                found["folder, files"] += 1
                found[f"{part}, MB"] = found.get(f"{part}, MB", 0.0) + size
    return found


def asked() -> dict[str, float]:
    """Return the age of the newest event that the server tells now, once it is there."""
    with suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT + 1}/metrics", timeout=30) as said:
            ages = METRIC.findall(said.read().decode())
        return {"event to server, s": float(ages[0])} if ages else {}
    return {}


def measure(folder: Path, rate: float, minutes: float) -> dict[str, Any]:
    """Run everything and return the samples, and the figures of windows."""
    incoming, runs = folder / "in", folder / "runs"
    incoming.mkdir(parents=True)
    Planted(WORLD).schema().save(folder / "schema.json")
    keys = [f"{key}={value}" for key, value in RUN.items()]
    keys += [f"data.schema={folder}/schema.json", f"data.stream.folder={incoming}"]
    keys += [f"run.storage_path={runs}"]
    command = [sys.executable, "-m", "rayrec.cli.main"]
    words = [*command, "train", *(word for key in keys for word in ("--set", key))]
    serve = [*command, "serve", "--follow", f"{runs}/soak", "--replicas", "1", "--port", str(PORT)]
    producer = multiprocessing.Process(target=produce, args=(incoming, rate), daemon=True)
    producer.start()
    log = (folder / "train.log").open("w")
    started = [subprocess.Popen(words, stdout=log, stderr=log)]
    trees, samples = {"train": started[0].pid}, list[dict[str, float]]()
    began = time.monotonic()
    try:
        while time.monotonic() - began < minutes * 60:
            assert all(process.poll() is None for process in started), "a process has ended"
            assert producer.is_alive(), "the producer has ended"
            if "server" not in trees and list((runs / "soak" / "published").glob("base-*")):
                said = (folder / "serve.log").open("w")
                started.append(subprocess.Popen(serve, stdout=said, stderr=said))
                trees["server"] = started[-1].pid
            minute = (time.monotonic() - began) / 60
            found = {"minute": minute} | taken(trees) | disk(runs / "soak") | asked()
            samples.append(found)
            (folder / "samples.json").write_text(json.dumps(samples))
            time.sleep(SAMPLE_S)
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(120)
            process.kill()
        producer.terminate()
    windows = dict[int, dict[str, Any]]()
    for line in (runs / "soak" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "stream":
            windows[event["window"]] = {name: event[name] for name in TOLD}
        elif event["event"] == "evaluation" and event["window"] in windows:
            windows[event["window"]]["auc"] = event["scores"]["auc"]
    return {"samples": samples, "windows": windows, "ended": started[0].returncode}


def main() -> None:
    """Measure, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=10_000.0)
    parser.add_argument("--folder", type=Path, help="kept, for a look at the run; must be empty")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        found = measure(args.folder or Path(made), args.rate, args.minutes)
    report.show("soak", found, table_of(found))
    with suppress(ImportError):
        draw(report.RESULTS / f"soak-{report.hardware()}-{date.today().isoformat()}.png", found)


def table_of(found: dict[str, Any]) -> list[str]:
    """Return the means of the parts of the time, in Markdown."""
    samples = found["samples"]
    last = samples[-1]["minute"]
    borders = np.linspace(min(SETTLED_MIN, last / 2), last, PARTS + 1)
    heads = [f"{a:.0f} to {b:.0f}" for a, b in pairwise(borders)]
    lines = [f"| minutes | {' | '.join(heads)} | last over first |"]
    lines.append("|---" * (PARTS + 2) + "|")
    for name in sorted({name for sample in samples for name in sample} - {"minute"}):
        means = [
            float(np.mean([s.get(name, 0.0) for s in samples if a <= s["minute"] <= b]))
            for a, b in pairwise(borders)
        ]
        ratio = means[-1] / means[0] if means[0] else float("nan")
        cells = " | ".join(f"{mean:,.1f}" for mean in means)
        lines.append(f"| {name} | {cells} | {ratio:.3f} |")
    windows = [one for one in found["windows"].values() if "auc" in one]
    # a window of one label has none
    settled = [one for one in windows[len(windows) // 4 :] if one["best_auc"] is not None]
    auc, best = (float(np.mean([one[name] for one in settled])) for name in ("auc", "best_auc"))
    rows, refused = (sum(one[name] for one in windows) for name in ("rows", "refused"))
    lag = float(np.percentile([one["lag_s"] for one in windows], 99))
    lines += [
        "",
        f"{len(windows)} windows of {rows:,} rows, {refused} refused; the 99th percentile of the "
        f"lag is {lag:.1f} s. Before training, the last three quarters of the windows have a mean "
        f"AUC of {auc:.4f}, and the best is {best:.4f}.",
    ]
    return lines


def draw(path: Path, found: dict[str, Any]) -> None:
    """Write the curves of memory, disk, age and AUC as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    samples, windows = found["samples"], list(found["windows"].values())
    figure = Figure(figsize=(9.0, 10.0), layout="constrained")
    plots = figure.subplots(4)
    disk_parts = ("folder", "checkpoints", "published", "stream", "events.jsonl")
    memory = [f"{part}, MB" for part in (*KINDS, "server")]
    shown = (memory, [f"{part}, MB" for part in disk_parts], ["event to server, s"])
    for plot, curves, title in zip(plots, shown, ("memory", "disk", "age"), strict=False):
        for name in curves:
            points = [(s["minute"], s[name]) for s in samples if name in s]
            plot.plot(*zip(*points, strict=True), label=name, linewidth=1)
        plot.set_title(title, fontsize=9)
    told = [one for one in windows if "auc" in one and one["best_auc"] is not None]
    for name in ("auc", "best_auc"):
        plots[3].plot([one["step"] for one in told], [one[name] for one in told], label=name)
    plots[3].set_title("AUC of windows before training, by step", fontsize=9)
    for plot in plots:
        plot.set_ylim(bottom=0.5 if plot is plots[3] else 0)
        plot.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
