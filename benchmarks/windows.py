"""How near a model that is trained day after day comes to the best AUC, before and after a drift.

    python -m benchmarks.windows [--seeds 1 2 3]

An event log with planted truth (`rayrec make-data --days`) of 26 days, 80,000 events each; from day
12 on all items have other factors, and the days behind it show how the model recovers. DIN scores
each day before it trains on it, once. The settings were chosen on seed 0, which is none of those
that are told, with 20 days.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import report
from rayrec.cli.main import main as rayrec
from rayrec.data.planted_log import PlantedLogConfig
from rayrec.data.synthetic_log import write_planted_log

DRIFT, DAYS = 12, 26
LOG = PlantedLogConfig(
    events=80_000 * DAYS, users=4000, items=100, days=DAYS, dim=8, drift_day=DRIFT
)  # fmt: skip
SETTINGS = (
    "model.model=din",
    "model.attention_layers=[]",
    "model.over_layers=[256,128]",
    "data.windows.column=day",
    "run.epochs=1",
    "run.global_batch_size=512",
    "run.progress=off",
    "run.sparse_optimizer={name='adam',lr=0.01}",
    "run.dense_optimizer={name='adam',lr=0.003}",
)
TOLD = (1, 5, DRIFT - 1, DRIFT, DRIFT + 3, DRIFT + 7, DRIFT + 10, DAYS - 1)
Days = dict[str, dict[str, float]]


def one_seed(folder: Path, seed: int) -> Days:
    """The scores of each day, beside the best."""
    write_planted_log(folder, replace(LOG, seed=seed))
    told = folder / "result.json"
    keys = [f"data.train={folder}/log", f"data.schema={folder}/schema.json", f"run.seed={seed}"]
    words = [word for key in (*keys, *SETTINGS) for word in ("--set", key)]
    assert rayrec(["train", "--local", "--result", str(told), *words]) == 0
    days = json.loads(told.read_text())["windows"]
    return {
        f"day {one['window']}": {name: one[name] for name in ("auc", "bayes_auc", "ne", "rows")}
        for one in days
    }


def lines_of(runs: Sequence[Days]) -> list[str]:
    """The AUC of some days and the distance from the best, in Markdown."""
    lines = [f"| {len(runs)} seeds: mean (sd) | AUC | below the best |", "|---|---|---|"]
    for day in (f"day {number}" for number in TOLD):
        auc = np.array([run[day]["auc"] for run in runs])
        regret = np.array([run[day]["bayes_auc"] - run[day]["auc"] for run in runs])
        cells = [f"{one.mean():.4f} ({one.std(ddof=1):.4f})" for one in (auc, regret)]
        lines.append(f"| {day} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Run every seed, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        runs = {f"seed {seed}": one_seed(Path(made, str(seed)), seed) for seed in args.seeds}
    report.show("windows", runs, lines_of(list(runs.values())))


if __name__ == "__main__":
    main()
