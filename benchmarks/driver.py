"""Training through Ray against the same loop without Ray, on the same Parquet files, in turns.

    python -m benchmarks.driver [--ranks 2] [--rounds 4] [--rows 800000]

Both sides run `RankTrainer` with the same spec on planted-truth data: one in Ray actors started by
`Driver.fit`, the other in plain processes over the same gloo rendezvous. Compared are the rows per
second of training alone, without evaluation and start-up, of which the first steps are a part: the
first batch is read, kernels load, and Ray is still busy with its own start. "all hooks" is the same
run through Ray with everything on that watches it: events in its folder, metrics for Prometheus, a
metric of its own, and callbacks that look at every step on the ranks and in the driver. Beside them
stand the cores that the ranks got, since Ray's own processes run on the same, and what of the mean
step rank 0 worked and waited for others: who is pushed off its core holds up all.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.ranks import join
from benchmarks.workload import quartiles
from rayrec.driver.ray_metrics import RayMetrics
from rayrec.metrics import Metric
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train.callbacks import Callback
from rayrec.train.events import ProgressReport

FIRST_STEPS = 30


class Positives(Metric):
    """The share of positive predictions."""

    def start(self, device: torch.device) -> torch.Tensor:
        """(2,): positive predictions, rows."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, state: torch.Tensor, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        """See `Metric`."""
        positive = (predictions > 0).double()
        state += torch.stack([positive.sum(), torch.ones_like(positive).sum()])

    def scores(self, state: torch.Tensor) -> dict[str, float]:
        """See `Metric`."""
        return {"positives": float(state[0] / state[1])}


class Looks(Callback):
    """Looks at every step."""

    seen = 0

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Count."""
        self.seen += 1


def spec_of(folder: str, args: argparse.Namespace, plan: Any) -> Any:
    """The run as plain data."""
    from rayrec.train.config import TrainSpec
    from rayrec.train.optimizer_config import OptimizerConfig

    schema = Path(folder, "schema.json").read_text()
    return TrainSpec(
        model=ModelRecipe(model="dlrm", schema=schema),
        data=open_data(f"{folder}/train", schema),
        plan=plan,
        global_batch_size=args.batch,
        steps=args.rows // args.batch,
        sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.1),
        dense_optimizer=OptimizerConfig(name="adam", lr=3e-3),
    )


class Run(NamedTuple):
    """Rows per second, the cores that all ranks used together, and what rank 0 worked and waited in
    a step, in ms.
    """

    rows_per_s: float
    cores: float
    worked_ms: float
    waited_ms: float

    @staticmethod
    def of(reports: Sequence[ProgressReport], times: Sequence[Any]) -> Run:
        """From the reports of a run and the mean step of its ranks."""
        cores, parts = sum(rank.cpu_s / rank.step_s for rank in times), times[0].parts.values()
        return Run(
            steady(reports),
            cores,
            1e3 * sum(part.seconds - part.waited for part in parts),
            1e3 * times[0].waited_s,
        )


def steady(reports: Sequence[ProgressReport]) -> float:
    """Rows per second of all windows but those of the first steps."""
    rows = seconds = 0.0
    for before, window in pairwise(reports):
        if before.step >= FIRST_STEPS:
            rows += window.rows - before.rows
            seconds += (window.rows - before.rows) / window.rows_per_s
    return rows / seconds


def bare_rank(
    rank: int, port: Any, folder: str, args: argparse.Namespace, plan: Any, queue: Any
) -> None:
    """One rank without Ray."""
    from rayrec.machine.memory import tune_malloc

    tune_malloc()

    from rayrec.comm.process_group import destroy_process_group
    from rayrec.train.loop import RankTrainer

    join(rank, args.ranks, lambda found: [port.put(found) for _ in range(args.ranks - 1)], port.get)
    reports: list[Any] = []  # a run that saves and scores nothing tells of windows alone
    trainer = RankTrainer(spec_of(folder, args, plan))
    trainer.run(
        on_event=lambda event: reports.append(event) if isinstance(event, ProgressReport) else None
    )
    queue.put(Run.of(reports, trainer.times()))
    destroy_process_group()


def through_ray(driver: Any) -> Run:
    """The loop in actors."""
    result = driver.fit()
    return Run.of(result.reports, result.hindsight.measured)


def bare(folder: str, args: argparse.Namespace, plan: Any) -> Run:
    """The loop in plain processes."""
    context = mp.get_context("spawn")
    port, queue = context.Queue(), context.Queue()
    ranks = [
        context.Process(target=bare_rank, args=(r, port, folder, args, plan, queue))
        for r in range(args.ranks)
    ]
    for process in ranks:
        process.start()
    runs: list[Run] = [queue.get(timeout=600) for _ in ranks]
    for process in ranks:
        process.join(30)
    return min(runs)


def main() -> None:
    """Run both sides in turns, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rows", type=int, default=800_000)
    parser.add_argument("--batch", type=int, default=4096)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import write_synthetic
    from rayrec.driver import CheckpointConfig, Driver, RunConfig, ScalingConfig, Task

    runs: dict[str, list[Run]] = {"through Ray": [], "without Ray": [], "all hooks": []}
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(folder, SyntheticConfig(rows_train=args.rows, rows_eval=1000))
        spec = spec_of(folder, args, None)
        run = RunConfig(
            global_batch_size=args.batch,
            steps=spec.steps,
            sparse_optimizer=spec.sparse_optimizer,
            dense_optimizer=spec.dense_optimizer,
            progress="off",
        )
        driver = Driver(spec.model, spec.data, ScalingConfig(num_workers=args.ranks), run)
        hooked = replace(
            run,
            storage_path=f"{folder}/runs",
            callbacks=(RayMetrics(), Looks()),
            rank_callbacks=(Looks(),),
            tasks=(Task(name="click", metrics=(Positives(),)),),
            checkpoint=CheckpointConfig(at_end=False),
        )
        watched = Driver(spec.model, spec.data, ScalingConfig(num_workers=args.ranks), hooked)
        plan = driver.plan()
        sides = {
            "all hooks": lambda: through_ray(watched),
            "through Ray": lambda: through_ray(driver),
            "without Ray": lambda: bare(folder, args, plan),
        }
        for i in range(args.rounds):
            # the first of a round starts on a machine that has just rested
            for side in sorted(sides, reverse=i % 2 == 1):
                runs[side].append(sides[side]())
    rates, cores, worked, waited = (
        {side: [run[i] for run in found] for side, found in runs.items()}
        for i in range(len(Run._fields))
    )
    ratio = quartiles(
        [a / b for a, b in zip(rates["through Ray"], rates["without Ray"], strict=True)]
    )
    lines = [
        "| loop | rows/s, median (min to max) | cores of the ranks | worked, ms a step | waited |",
        "|---|---|---|---|---|",
    ]
    for name, values in rates.items():
        q = quartiles(values)
        used, work, wait = (quartiles(found[name])["median"] for found in (cores, worked, waited))
        rate = f"{q['median']:,.0f} ({q['min']:,.0f} to {q['max']:,.0f})"
        lines.append(
            f"| {name} | {rate} | {used:.2f} of {os.cpu_count()} | {work:.2f} | {wait:.2f} |"
        )
    lines.append(
        f"\nRay / bare, round by round: {ratio['median']:.3f} ({ratio['min']:.3f} to "
        f"{ratio['max']:.3f}), {args.rounds} rounds."
    )
    hooks = quartiles(
        [a / b for a, b in zip(rates["all hooks"], rates["through Ray"], strict=True)]
    )
    lines[-1] += (
        f" All hooks / through Ray: {hooks['median']:.3f} ({hooks['min']:.3f} to "
        f"{hooks['max']:.3f})."
    )
    label = None if args.ranks == 2 else f"driver-ranks{args.ranks}"
    report.show(
        "driver",
        {
            "rates": rates,
            "cores": cores,
            "worked_ms": worked,
            "waited_ms": waited,
            "ratio": ratio,
            "hooks": hooks,
        },
        lines,
        label,
    )


if __name__ == "__main__":
    main()
