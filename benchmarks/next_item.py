"""What next-item models find of the film that a user rates next, beside what needs no training.

    python -m benchmarks.next_item [--seeds 0 1 2 3 4] [--validate] [--systems hstu ...]

MovieLens-100k, leave one out: the last rating of every user is the test, the one before it the
validation, and all items are ranked. Figures depend on the protocol, so both are told: films that
the user has rated kept in the list, or masked. They also depend on the rule for ratings of equal
time, which 44% of the users have at their end: that of `jobs.convert_movielens` is the order of the
file. --validate ranks the validation, on which the settings were chosen; a run for the test trains
on the same ratings.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.quality_films import source
from jobs.convert_movielens import convert_movielens_log
from rayrec.cli.main import main as rayrec

LENGTH, DIM, EPOCHS = 50, 64, 12
SEEN = 1 << 20  # more ratings than any user has
SYSTEMS: dict[str, tuple[str, ...]] = {
    "GRU4Rec, sampled softmax": ("model=gru4rec",),
    "SASRec, full softmax": ("model=sasrec", "loss=full"),
    "SASRec, sampled softmax": ("model=sasrec",),
    "HSTU, sampled softmax": ("model=hstu", "times=history_time"),
}
BASELINES = {"popularity": "popularity", "markov": "Markov chain, last 5 films"}
PROTOCOLS = ("kept", "masked")
NAMES = tuple(f"{protocol} {name}@10" for protocol in PROTOCOLS for name in ("hr", "ndcg"))
Scores = dict[str, float]


def make_log(folder: Path) -> None:
    """Convert the ratings; all films that a user has rated become a sequence of the schema."""
    convert_movielens_log(source(), folder, history=LENGTH, dim=DIM)
    path = folder / "schema.json"
    schema = json.loads(path.read_text())
    schema["sequences"].append({"name": "seen", "column": "item", "history": SEEN})
    path.write_text(json.dumps(schema))


def trained(folder: Path, part: str, seed: int, settings: Sequence[str]) -> dict[str, Scores]:
    """The scores of a run and of the baselines, by name."""
    with tempfile.TemporaryDirectory() as work:
        told = Path(work, "result.json")
        keys = [f"data.train={folder}/log", f"data.eval={folder}/log"]
        keys += [f"data.schema={folder}/schema.json", f"data.eval_where=split == '{part}'"]
        keys += ["data.where=split == 'train' and window_end == true", "model.seen=seen"]
        keys += [f"run.epochs={EPOCHS}", f"run.seed={seed}", "run.progress=off"]
        keys += [f"model.{setting}" for setting in settings]
        words = [word for key in keys for word in ("--set", key)]
        assert rayrec(["train", "--local", "--result", str(told), *words]) == 0
        result = json.loads(told.read_text())
    return {
        ranker: {
            f"{protocol} {score}": value
            for protocol in PROTOCOLS
            for score, value in result[f"{ranker} {protocol}"].items()
        }
        for ranker in ("model", *BASELINES)
    }


def one_seed(folder: Path, part: str, seed: int, systems: Sequence[str]) -> dict[str, Scores]:
    """The scores of every system with a seed, and of the baselines, which have none."""
    found: dict[str, Scores] = {}
    for system in systems:
        scores = trained(folder, part, seed, SYSTEMS[system])
        found |= {title: scores[name] for name, title in BASELINES.items()}
        found[system] = scores["model"]
        print(f"seed {seed}, {system}: {scores['model']}", flush=True)
    return found


def lines_of(runs: Sequence[dict[str, Scores]]) -> list[str]:
    """The means over seeds, with their standard deviations, in Markdown."""
    lines = [f"| {len(runs)} seeds: mean (sd) | {' | '.join(NAMES)} |"]
    lines.append("|---" * (len(NAMES) + 1) + "|")
    for who in runs[0]:
        cells = [np.array([run[who][name] for run in runs]) for name in NAMES]
        spread = [
            f"{cell.mean():.4f} ({cell.std(ddof=min(1, len(cell) - 1)):.4f})" for cell in cells
        ]
        lines.append(f"| {who} | {' | '.join(spread)} |")
    return lines


def main() -> None:
    """Run every seed, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--validate", action="store_true", help="rank the validation")
    parser.add_argument("--systems", nargs="+", default=[""], help="parts of names of systems")
    args = parser.parse_args()
    wanted = [name for name in SYSTEMS if any(word in name.lower() for word in args.systems)]
    part = "validation" if args.validate else "test"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "films")
        make_log(folder)
        runs = {f"seed {s}": one_seed(folder, part, s, wanted) for s in args.seeds}
    if args.validate:
        print("\n".join(lines_of(list(runs.values()))))
    else:
        report.show("next_item", runs, lines_of(list(runs.values())))


if __name__ == "__main__":
    main()
