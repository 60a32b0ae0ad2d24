"""Sync points against incremental saves into a folder in memory: two ways to lose few steps.

    python -m benchmarks.sync_points [--every 20 100] [--rounds 3] [--steps 1200] [--write]

Ranks train a DLRM through `Driver.fit` on planted clicks, with small tables and with large ones:
with neither way, with sync points, and with increments that threads write into /dev/shm, each at
the same intervals. The runs take turns. Without faults the seconds and CPU seconds of a step, and
the memory of the host that the run holds, are compared with those of a run that has neither.
With faults, in the first turn, a rank kills itself (SIGKILL) after the same steps. Reported are the
seconds from the kill to the next finished step, and the steps done again. All tables of all runs
must end as those of the first run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from rayrec.chaos.digests import digests
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train.callbacks import Callback

MEMORY = "/dev/shm"
# most ids of a column, and the tables' width: 2 MB and 400 MB
CASES = {"small": (2000, 16), "large": (400_000, 32)}
RECORD = "<ddqq"  # wall clock, CPU seconds of the process, step, process id
SAMPLE_S = 0.5


class Way(NamedTuple):
    """A way to lose few steps; `every` is 0 in the run that has none."""

    name: str
    every: int

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.name}, every {self.every}" if self.every else self.name


class StepTimes(Callback):
    """On every rank: notes each step, and kills the process after planned ones, once each.

    Args:
        kills: rank that dies, by the step after which it does.
    """

    def __init__(self, folder: str, kills: Mapping[int, int]) -> None:
        self._folder, self._kills = folder, dict(kills)

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Append a record, then die if it is time."""
        record = struct.pack(RECORD, time.time(), time.process_time(), step, os.getpid())
        with open(f"{self._folder}/steps-{trainer.rank}", "ab") as file:
            file.write(record)
        done = Path(f"{self._folder}/killed-{step}")
        if self._kills.get(step) == trainer.rank and not done.exists():
            done.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


class Held:
    """Samples the memory that a run holds: of its ranks, of their keeper, and in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = folder, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.most = 0.0

    def __enter__(self) -> Held:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.most = max(self.most, self._bytes() / 1e6)

    def _bytes(self) -> int:
        total = 0
        for path in self._folder.rglob("*"):
            try:
                total += path.stat().st_blocks * 512
            except OSError:  # pruned meanwhile
                continue
        for path in self._folder.glob("steps-*"):
            total += sum(own_memory(pid) for _, _, _, pid in records(path)[-1:])
        return total


def own_memory(pid: int) -> int:
    """Bytes of a process without its files: of what it shares, its part."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value, *_ = line.split()
            total += int(value) * 1024 if name in ("Pss_Anon:", "Pss_Shmem:") else 0
    except OSError:
        return 0
    return total


def train(
    data: Any, way: Way, kills: Mapping[int, int], args: argparse.Namespace
) -> dict[str, Any]:
    """Train once, and return what came of it."""
    from rayrec.driver import Driver, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig
    from rayrec.train.checkpoint_config import CheckpointConfig

    schema = data.schema.read_text()
    checkpoint, points = CheckpointConfig(), None
    if way.name == "sync points":
        points = way.every
    elif way.every:
        checkpoint = CheckpointConfig(
            every_n_steps=way.every,
            num_to_keep=1,
            incremental=True,
            asynchronous=way.name == "increments, asynchronous",
        )
    with tempfile.TemporaryDirectory(prefix="rayrec-sync-", dir=MEMORY) as name:
        folder = Path(name)
        driver = Driver(
            ModelRecipe(
                model="dlrm",
                schema=schema,
                dense_layers=tuple(args.dense_layers),
                over_layers=tuple(args.over_layers),
            ),
            open_data(str(data.train), schema),
            ScalingConfig(num_workers=args.ranks, spares=args.spares if kills else 0),
            RunConfig(
                global_batch_size=args.batch,
                steps=args.steps,
                sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.05),
                dense_optimizer=OptimizerConfig(name="adam", lr=1e-3),
                storage_path=str(folder / "run"),
                checkpoint=checkpoint,
                failure=FailureConfig(max_failures=-1, sync_every_n_steps=points),
                timeout_s=600.0,
                progress="off",
                rank_callbacks=(StepTimes(name, kills),),
            ),
        )
        with Held(folder) as held:
            result = driver.fit()
        assert result.checkpoint is not None
        told = {
            "way": way.label,
            "load": os.getloadavg()[0],
            "digests": digests(str(Path(result.checkpoint).parent)),
        }
        if kills:
            waits, again = after_kills(folder)
            return {**told, "waits": waits, "again": again}
        return {**told, **step_cost(folder, args), "held_mb": held.most}


def records(path: Path) -> list[tuple[float, float, int, int]]:
    """Read the whole records of one rank, which may write one just now."""
    told, size = path.read_bytes(), struct.calcsize(RECORD)
    return list(struct.iter_unpack(RECORD, told[: len(told) // size * size]))


def step_cost(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a step, and its CPU seconds over all ranks, after the first steps."""
    seconds, cpu = 0.0, 0.0
    for path in folder.glob("steps-*"):
        by_step = {step: (at, used) for at, used, step, _ in records(path)}
        began, ended = by_step[args.warm], by_step[args.steps]
        seconds = max(seconds, ended[0] - began[0])
        cpu += ended[1] - began[1]
    steps = args.steps - args.warm
    return {"ms": 1e3 * seconds / steps, "cpu_ms": 1e3 * cpu / steps}


def after_kills(folder: Path) -> tuple[list[float], list[int]]:
    """Return, for each kill, the seconds to the next step, and the steps that were done again."""
    waits, again = [], []
    told = records(folder / "steps-0")
    for at in sorted(float(path.read_text()) for path in folder.glob("killed-*")):
        last = max(step for when, _, step, _ in told if when <= at)
        for when, _, step, _ in told:
            if when > at:
                if step <= last:
                    break
                last = step  # a survivor finishes the step under way
        waits.append(when - at)
        again.append(last - step + 1)
    return waits, again


def main() -> None:
    """Run and report."""
    args = parse()
    results: dict[str, Any] = {}
    lines = []
    for case in args.cases:
        with tempfile.TemporaryDirectory(prefix="rayrec-sync-data-") as name:
            results[case] = measure(Path(name), case, args)
        lines += [f"## {case}", "", *table(results[case]), ""]
    print("\n".join(lines))
    if args.write:
        results["load"] = os.getloadavg()
        print("written:", report.write("sync_points", results, "\n".join(lines)))


def measure(folder: Path, case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in all ways by turns, and return what came of each."""
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import write_synthetic
    from rayrec.driver.cluster import connected

    cap, width = CASES[case]
    config = SyntheticConfig(rows_train=args.rows, rows_eval=1000, cap=cap, dim=width, seed=1)
    data = write_synthetic(folder, config)
    ways = [Way("neither", 0)]
    ways += [Way(name, every) for every in args.every for name in args.ways]
    kills = {step: number % args.ranks for number, step in enumerate(args.kills)}
    found = []
    with connected(args.ranks + args.spares):
        for number in range(args.rounds):
            turned = ways[number % len(ways) :] + ways[: number % len(ways)]
            plans: list[tuple[Way, dict[int, int]]] = [(way, {}) for way in turned]
            plans += [(way, kills) for way in turned if kills and way.every and not number]
            for way, planned in plans:
                found.append({**train(data, way, planned, args), "case": case})
                print(found[-1], flush=True)
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    """The ways of one case as Markdown; ratios are medians over rounds."""
    lines = [
        "| way | ms a step | ratio | CPU ms | ratio | more memory "
        "| kill to next step, median | worst | steps again, mean | most | same tables |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    labels = list(dict.fromkeys(row["way"] for row in found))
    calm = {label: [r for r in found if r["way"] == label and "ms" in r] for label in labels}
    plain = calm["neither"]
    for label in sorted(labels, key=lambda label: label != "neither"):
        killed = [row for row in found if row["way"] == label and "waits" in row]
        waits = [wait for row in killed for wait in row["waits"]]
        again = [steps for row in killed for steps in row["again"]]
        cells, pairs = [label], list(zip(calm[label], plain, strict=True))
        for key in ("ms", "cpu_ms"):
            cells.append(f"{statistics.median(row[key] for row in calm[label]):.2f}")
            cells.append(f"{statistics.median(one[key] / other[key] for one, other in pairs):.3f}")
        more = (one["held_mb"] - other["held_mb"] for one, other in pairs)
        cells.append(f"{statistics.median(more):.0f} MB")
        if waits:
            cells += [f"{statistics.median(waits):.2f} s", f"{max(waits):.2f} s"]
            cells += [f"{statistics.mean(again):.1f}", str(max(again))]
        else:
            cells += [""] * 4
        same = all(row["digests"] == plain[0]["digests"] for row in [*calm[label], *killed])
        lines.append(f"| {' | '.join([*cells, 'yes' if same else 'NO'])} |")
    return lines


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--every", type=int, nargs="+", default=[20, 100])
    add("--ways", nargs="+", default=["sync points", "increments, asynchronous"])
    add("--kills", type=int, nargs="*", default=[437, 659, 881])
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=1200)
    add("--warm", type=int, default=200)
    add("--ranks", type=int, default=2)
    add("--spares", type=int, default=0)
    add("--rows", type=int, default=1_000_000)
    add("--batch", type=int, default=2048)
    add("--dense-layers", type=int, nargs="*", default=[64])
    add("--over-layers", type=int, nargs="*", default=[64, 32])
    add("--write", action="store_true")
    args = parser.parse_args()
    for kill in args.kills:
        if on := [every for every in args.every if kill % every == 0]:
            parser.error(
                f"--kills {kill} falls on a point of --every {on[0]}, after which no step is done "
                "again; take another step."
            )
    return args


if __name__ == "__main__":
    main()
