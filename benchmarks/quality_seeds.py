"""What the settings reach on planted data that nothing was chosen on: means over seeds of the data.

    python -m benchmarks.quality_seeds [--only chosen first truths easy default]

"truths" trains the defaults of a run (`rayrec.train.optimizer_config`, `rayrec.recipe`), those
before them, and today's with a dense rate that falls to 0, on five truths of several shapes. "easy"
trains the recipe of `benchmarks.quality`, and "default" the defaults on the data of `rayrec
make-data`, each on five seeds of the data, beside the plain torch twin of `benchmarks.quality_twin`
with the same settings. A data set has its own truth in each seed. Settings were frozen before any
of these rows was made: the defaults were chosen on the truths of "chosen", which say nothing about
what is reported, and "first" scores them on truths of an earlier choice.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.quality_run import Trial, scores_of
from benchmarks.quality_settings import PLANTED, Recipe
from rayrec.data.planted import SyntheticConfig
from rayrec.recipe import INIT_BOUND
from rayrec.train.optimizer_config import (
    DEFAULT_BATCH,
    DEFAULT_DENSE,
    DEFAULT_SPARSE,
    OptimizerConfig,
)

DEFAULTS = Recipe(
    tables=DEFAULT_SPARSE,
    dense=DEFAULT_DENSE,
    batch=DEFAULT_BATCH,
    decay="constant",
    bound=INIT_BOUND,
)
# what `rayrec train` and the job took before
BEFORE = replace(
    DEFAULTS, tables=OptimizerConfig(name="rowwise_adagrad", lr=0.1), batch=4096, bound=None
)
SHAPES: dict[str, dict[str, Any]] = {
    "default shape": {"rows_train": 800_000},
    "few rows, few ids": {"rows_train": 300_000, "cap": 300},
    "many ids": {"rows_train": 600_000, "cap": 10_000, "num_features": 20},
    "pairs": {"rows_train": 600_000, "num_features": 14, "low_rank": 0.15, "cross": 0.1},
    "rare clicks, weak signal": {
        "rows_train": 500_000,
        "cap": 1000,
        "base_rate": 0.1,
        "signal": 1.2,
    },
}


def truths(seed: int) -> dict[str, SyntheticConfig]:
    """A truth of each shape; the seeds count from this one."""
    numbered = enumerate(SHAPES.items(), seed)
    return {name: SyntheticConfig(seed=i, **shape) for i, (name, shape) in numbered}


# an earlier choice of defaults was scored on these
FIRST = truths(101)
# for a run that ends with its data: Adagrad's steps of the tables grow shorter by themselves
FALLING = replace(
    DEFAULTS, dense=OptimizerConfig(name="adam", lr=4e-3), decay="linear", tables_decay="constant"
)
CHOSEN_ON = {
    **{f"{name}, {seed}": one for seed in (410, 420) for name, one in truths(seed).items()},
    **{f"ready-made shape, {seed}": SyntheticConfig(seed=seed) for seed in (451, 452)},
}
TRUTHS = truths(301)
SEEDS = (201, 202, 203, 204, 205)
# those above were scored with defaults of before
FRESH_SEEDS = (501, 502, 503, 504, 505)
EASY = SyntheticConfig(rows_train=1_000_000, num_features=12, cap=200)
Scores = dict[str, float]


class System(NamedTuple):
    """What trains: a recipe, by rayrec on one rank in this process, or by its plain twin.

    Attributes:
        seeds: of initial values and of the order of the rows; a score is the mean over them.
    """

    recipe: Recipe
    is_twin: bool = False
    seeds: tuple[int, ...] = (0,)

    def scores(self, folder: Path) -> Scores:
        """Train and score."""
        found = [self._scores(folder, seed) for seed in self.seeds]
        return {name: float(np.mean([one[name] for one in found])) for name in found[0]}

    def _scores(self, folder: Path, seed: int) -> Scores:
        from benchmarks.quality_twin import twin_scores

        if self.is_twin:
            return twin_scores(folder, self.recipe, seed)
        return scores_of(folder, Trial(recipe=self.recipe, seed=seed))


def regrets(config: SyntheticConfig, systems: Mapping[str, System]) -> dict[str, Scores]:
    """Make the data, and train each system on them once."""
    from rayrec.data.synthetic import write_synthetic
    from rayrec.metrics.truth import PlantedScores

    found = {}
    with tempfile.TemporaryDirectory() as made:
        paths = write_synthetic(made, config)
        truth = PlantedScores.load(paths.truth)
        for name, system in systems.items():
            scores = system.scores(Path(made))
            found[name] = {
                "regret": truth.bayes_auc - scores["auc"],
                "logloss_above": scores["logloss"] - truth.bayes_logloss,
                "seconds": scores["seconds"],
            }
            print(f"seed {config.seed}, {name}: {json.dumps(found[name])}", flush=True)
    return found


def beside_twin(recipe: Recipe) -> dict[str, System]:
    """A recipe by rayrec and by its twin."""
    return {"rayrec": System(recipe), "plain torch": System(recipe, is_twin=True)}


COMPARED = {
    "before": System(BEFORE, seeds=(0, 1, 2)),
    "defaults": System(DEFAULTS, seeds=(0, 1, 2)),
    "falling": System(FALLING, seeds=(0, 1, 2)),
}
PARTS: dict[str, tuple[Mapping[str, SyntheticConfig], Mapping[str, System]]] = {
    "chosen": (CHOSEN_ON, COMPARED),
    "first": (FIRST, COMPARED),
    "truths": (TRUTHS, COMPARED),
    "easy": ({f"seed {seed}": replace(EASY, seed=seed) for seed in SEEDS}, beside_twin(PLANTED)),
    "default": (
        {f"seed {seed}": SyntheticConfig(seed=seed) for seed in FRESH_SEEDS},
        beside_twin(DEFAULTS),
    ),
}
TITLES = {
    "chosen": "Regret on the truths of the choice, the mean of three model seeds",
    "first": "Regret on truths of an earlier choice, the mean of three model seeds",
    "truths": "Regret on truths that were not looked at, the mean of three model seeds",
    "easy": f"The recipe of benchmarks.quality; {EASY}",
    "default": f"The defaults on the data of `rayrec make-data`; {SyntheticConfig()}",
}


def lines_of(results: dict[str, Any]) -> list[str]:
    """The tables in Markdown."""
    lines = []
    for part, runs in results.items():
        names = list(next(iter(runs.values())))
        others = " | ".join(f"{name}, ratio" for name in names[1:])
        lines += [f"{TITLES[part]}.", "", f"| regret | {' | '.join(names)} | {others} |"]
        lines.append("|---" * 2 * len(names) + "|")
        table = np.array([[run[name]["regret"] for name in names] for run in runs.values()])
        for about, row in zip(runs, table, strict=True):
            cells = " | ".join(f"{value:.4f}" for value in row)
            ratios = " | ".join(f"{value / row[0]:.2f}" for value in row[1:])
            lines.append(f"| {about} | {cells} | {ratios} |")
        if part in ("easy", "default"):
            ends = zip(table.mean(0), table.std(0, ddof=1), strict=True)
            cells = " | ".join(f"{mean:.4f} ({sd:.4f})" for mean, sd in ends)
            gaps = table[:, 0] - table[:, 1]
            lines.append(f"| mean (sd) | {cells} | |")
            lines += ["", f"rayrec above its twin: {gaps.mean():+.4f} (sd {gaps.std(ddof=1):.4f})."]
        lines.append("")
    return lines


def main() -> None:
    """Run the parts, print and write after each."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=["truths", "easy", "default"])
    text = "data sets at a time, each in a process of one thread"
    parser.add_argument("--processes", type=int, default=2, help=text)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that this one starts
    for part in args.only:
        data, systems = PARTS[part]
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            runs = pool.map(regrets, data.values(), repeat(systems))
            found = dict(zip(data, runs, strict=True))
        results = {part: found}
        report.show("quality_seeds", results, lines_of(results), f"quality-{part}")


if __name__ == "__main__":
    main()
