"""A run under a seeded schedule of faults: ranks are killed or frozen at random moments.

    python -m benchmarks.recovery [--faults 20] [--stops 0.1] [--every 6] [--ranks 2] [--seed 0]
        [--sync-points 20] [--spares 1]

A DLRM trains on planted-truth data through `Driver.fit`, once without faults and then again and
again under faults, until there were as many as asked for. Reported are the seconds from a fault to
the next finished step (rank 0 notes the time of every step in a file), how many steps were done
again, the memory that the ranks gained, and whether the tables, with their optimizer state, are
those of the run without faults, bit for bit, by a digest per table.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from rayrec.chaos.digests import digests
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train.callbacks import Callback
from rayrec.train.events import Failure, Recovered

RECORD = "<dqq"  # seconds of the wall clock, step, number of the life


class StepClock(Callback):
    """On rank 0: notes when every step was finished."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._life: int | None = None

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Append one record; it costs some microseconds."""
        if trainer is None or trainer.rank:
            return
        # every life of a run is given a copy of its own
        if self._life is None:
            self._life = time.time_ns()
        with open(self._path, "ab") as file:
            file.write(struct.pack(RECORD, time.time(), step, self._life))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One blow at some processes; `at` is in seconds of the wall clock."""

    at: float
    number: int
    pids: tuple[int, ...]


class Chaos(Callback):
    """In the driver: strikes rank processes at random moments until the run ends.

    Args:
        driver: a list that holds the driver of the run.
    """

    def __init__(self, draw: random.Random, args: argparse.Namespace, driver: list[Any]) -> None:
        self._draw, self._args, self._driver = draw, args, driver
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._strike, name="chaos", daemon=True)
        self.faults: list[Fault] = []
        self.failures: list[Failure] = []
        self.recoveries: list[Recovered] = []

    def on_start(self, info: Any) -> None:
        """Begin; the ranks exist, and do not train yet."""
        self._thread.start()

    def on_failure(self, failure: Failure) -> None:
        """Count."""
        self.failures.append(failure)

    def on_recovery(self, recovered: Recovered) -> None:
        """Count."""
        self.recoveries.append(recovered)

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        """End."""
        self._end.set()

    def _strike(self) -> None:
        draw = self._draw
        while not self._end.wait(draw.expovariate(1 / self._args.every)):
            pids = self._ranks()
            if not pids:
                continue
            struck = draw.sample(pids, min(len(pids), 2 if draw.random() < 0.1 else 1))
            stop = draw.random() < self._args.stops
            number = signal.SIGSTOP if stop else signal.SIGKILL
            for pid in struck:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            self.faults.append(Fault(at=time.time(), number=number, pids=tuple(struck)))

    def _ranks(self) -> list[int]:
        """The rank processes of the driver's group, as they are just now."""
        controller = self._driver[0]._ranks._controller
        standing = None if controller is None else controller.standing
        pids = [] if standing is None else [address.pid for address in standing.roster.addresses]
        return [pid for pid in pids if _is_rank(pid)]


def _is_rank(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RankActor")
    except OSError:
        return False


def train(
    folder: Path, data: Any, args: argparse.Namespace, draw: random.Random | None
) -> tuple[Any, Chaos | None]:
    """One run; without a `draw` nothing happens to it."""
    from rayrec.driver import Driver, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig
    from rayrec.train.checkpoint_config import CheckpointConfig

    schema = data.schema.read_text()
    driver: list[Any] = []
    chaos = None if draw is None else Chaos(draw, args, driver)
    driver.append(
        Driver(
            ModelRecipe(model="dlrm", schema=schema),
            open_data(str(data.train), schema),
            ScalingConfig(num_workers=args.ranks, cpus_per_worker=args.cpus, spares=args.spares),
            RunConfig(
                global_batch_size=args.batch,
                steps=args.steps,
                sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.05),
                dense_optimizer=OptimizerConfig(name="adam", lr=3e-3),
                storage_path=str(folder),
                checkpoint=CheckpointConfig(every_n_steps=args.save_every, num_to_keep=2),
                failure=FailureConfig(max_failures=-1, sync_every_n_steps=args.sync_points),
                heartbeat_timeout_s=args.heartbeat,
                timeout_s=600.0,
                progress="plain" if args.verbose else "off",
                callbacks=() if chaos is None else (chaos,),
                rank_callbacks=(StepClock(str(folder / "steps")),),
            ),
            plan=args.plan,
        )
    )
    return driver[0].fit(), chaos


def next_steps(path: Path, faults: list[Fault]) -> tuple[list[float], int]:
    """Seconds from every fault to the next step of another life, and how many were done again.

    A fault that comes before the run stepped again belongs to the one before it.
    """
    records = list(struct.iter_unpack(RECORD, path.read_bytes()))
    waits = []
    last = 0.0
    for fault in faults:
        before = [life for at, _, life in records if at <= fault.at]
        after = [(at, life) for at, _, life in records if at > fault.at]
        # the step under way may still be finished
        ends = [at for at, life in after if not before or life != before[-1]]
        if ends and ends[0] != last:
            waits.append(ends[0] - fault.at)
            last = ends[0]
    repeated = len(records) - len({step for _, step, _ in records})
    return waits, repeated


def memory_gain(result: Any) -> float:
    """By how much the memory of the ranks' processes grew over a run, in MB a rank."""
    first, last = result.reports[1], result.reports[-1]
    return (sum(last.memory_bytes) - sum(first.memory_bytes)) / len(last.memory_bytes) / 1e6


def main() -> None:
    """Run and report."""
    args = parse()
    rows: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rayrec-recovery-") as name:
        rows = measure(Path(name), args)
    lines = table(rows, args)
    text = "\n".join(lines)
    print(text)
    if args.write:
        results = {"runs": rows, "load": os.getloadavg()}
        print("written:", report.write("recovery", results, text))


def measure(folder: Path, args: argparse.Namespace) -> list[Mapping[str, Any]]:
    """All runs, each with what came of it."""
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import write_synthetic
    from rayrec.driver.cluster import connected

    data = write_synthetic(
        folder / "data", SyntheticConfig(rows_train=args.rows, rows_eval=1000, seed=1)
    )
    rows: list[Mapping[str, Any]] = []
    with connected(args.ranks + max(args.spares, 1)):
        (folder / "calm").mkdir()
        calm, _ = train(folder / "calm", data, args, None)
        expected = digests(str(Path(calm.checkpoint).parent))
        print(f"calm: {calm.steps} steps in {calm.seconds:.1f} s, {len(expected)} digests")
        while sum(row["faults"] for row in rows) < args.faults:
            seed = args.seed + len(rows)
            where = folder / f"run-{len(rows)}"
            where.mkdir()
            started = time.monotonic()
            result, chaos = train(where, data, args, random.Random(seed))
            assert chaos is not None
            waits, repeated = next_steps(where / "steps", chaos.faults)
            told = digests(str(Path(result.checkpoint).parent))
            rows.append(
                {
                    "seed": seed,
                    "faults": len(chaos.faults),
                    "stops": sum(fault.number == signal.SIGSTOP for fault in chaos.faults),
                    "failures": result.failures,
                    "recoveries": result.recoveries,
                    "waits": waits,
                    "began": [recovered.seconds for recovered in chaos.recoveries],
                    "repeated": repeated,
                    "lost_s": result.seconds_lost,
                    "wall_s": time.monotonic() - started,
                    "memory_mb": memory_gain(result),
                    "same": told == expected,
                    "load": os.getloadavg()[0],
                }
            )
            print(rows[-1], flush=True)
            shutil.rmtree(where)
    return rows


def table(rows: list[Mapping[str, Any]], args: argparse.Namespace) -> list[str]:
    """The runs as Markdown."""
    lines = [
        "| seed | faults | of them stops | failures | recoveries | to the next step, median "
        "| worst | steps repeated | lost | memory | same tables | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in [*rows, _together(rows)]:
        waits = row["waits"] or [0.0]
        lines.append(
            f"| {row['seed']} | {row['faults']} | {row['stops']} | {row['failures']} "
            f"| {row['recoveries']} | {statistics.median(waits):.1f} s | {max(waits):.1f} s "
            f"| {row['repeated']} | {row['lost_s']:.1f} s | {row['memory_mb']:+.0f} MB "
            f"| {'yes' if row['same'] else 'NO'} | {row['load']:.1f} |"
        )
    return lines


def _together(rows: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    sums = ("faults", "stops", "failures", "recoveries", "repeated", "lost_s")
    return {
        "seed": "all",
        **{name: sum(row[name] for row in rows) for name in sums},
        "waits": [wait for row in rows for wait in row["waits"]],
        "memory_mb": max(row["memory_mb"] for row in rows),
        "same": all(row["same"] for row in rows),
        "load": statistics.mean(row["load"] for row in rows),
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--faults", type=int, default=20)
    add("--stops", type=float, default=0.1, help="share of the faults that freeze a rank")
    add("--every", type=float, default=8.0, help="mean seconds between two faults")
    add("--ranks", type=int, default=2)
    add("--cpus", type=float, default=1)
    add("--steps", type=int, default=400)
    add("--rows", type=int, default=200_000)
    add("--batch", type=int, default=512)
    add("--save-every", type=int, default=20)
    add("--sync-points", type=int, help="go on from memory, with a sync point every so many steps")
    add("--spares", type=int, default=0, help="processes that wait to replace lost ranks")
    add("--heartbeat", type=float, default=5.0)
    add("--plan", default="auto")
    add("--seed", type=int, default=0)
    add("--verbose", action="store_true")
    add("--write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
