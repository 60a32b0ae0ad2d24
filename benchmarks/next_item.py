"""What next-item models find of the film that a user rates next, beside what needs no training.

    python -m benchmarks.next_item [--seeds 0 1 2 3 4] [--validate] [--systems hstu ...]

MovieLens-100k, leave one out: the last rating of every user is the test, the one before it the
validation, and all items are ranked. Figures depend on the protocol, so both are told: films that
the user has rated kept in the list, or masked. They also depend on the rule for ratings of equal
time, which 44% of the users have at their end: that of `jobs.convert_movielens` is the order of the
file. A model is trained on all ratings before these two, in windows that are cut at random twelve
times. --validate ranks the validation, on which the settings were chosen.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.quality_films import source
from jobs.convert_movielens import convert_movielens_log
from rayrec.cli.main import main as rayrec
from rayrec.data import Feature, FeatureSchema, SequenceColumn
from rayrec.layout import EmbeddingConfig

LENGTH, DIM, PASSES = 50, 64, 12
SYSTEMS: dict[str, tuple[str, ...]] = {
    "GRU4Rec, sampled softmax": ("model=gru4rec",),
    "SASRec, full softmax": ("model=sasrec", "loss=full"),
    "SASRec, sampled softmax": ("model=sasrec",),
    "HSTU, sampled softmax": ("model=hstu", "times=times"),
}
BASELINES = {"popularity": "popularity", "markov": "Markov chain, last 5 films"}
PROTOCOLS = ("kept", "masked")
NAMES = tuple(f"{protocol} {name}@10" for protocol in PROTOCOLS for name in ("hr", "ndcg"))
Scores = dict[str, float]


Walk = NDArray[np.int64]  # (2, N): films and times of a user, in order


def read_walks(folder: Path) -> list[Walk]:
    """Convert the ratings to an event log, and return it user by user."""
    convert_movielens_log(source(), folder, history=LENGTH)
    log = pq.read_table(folder / "log", columns=["user", "item", "time"])
    users, items, times = (log[name].to_numpy() for name in ("user", "item", "time"))
    return np.split(np.stack([items, times]), np.flatnonzero(np.diff(users)) + 1, axis=1)


def windows(walk: Walk, random: np.random.Generator) -> list[Walk]:
    """Cut a walk at random into windows of LENGTH pairs; its end is always in one."""
    size = walk.shape[1]
    end = size - int(random.integers(0, min(LENGTH, size - 2))) if size > LENGTH else size
    ends = [*range(end, 1, -LENGTH), *([size] if end < size else [])]
    return [walk[:, max(0, end - LENGTH - 1) : end] for end in ends]


def write_rows(folder: Path, rows: Sequence[Walk], seen: Sequence[Walk] | None = None) -> None:
    """Write a history, the item behind it, and all films seen, for each window."""
    lists = pa.list_(pa.int64())
    columns = {
        "past": pa.array([row[0, :-1] for row in rows], lists),
        "item": pa.array([row[0, -1] for row in rows]),
        "times": pa.array([row[1, :-1] for row in rows], lists),
        "seen": pa.array([()] * len(rows) if seen is None else [one[0] for one in seen], lists),
    }
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=4096)


def make_data(folder: Path, seed: int) -> None:
    """Write train, validation and test, and schema.json."""
    walks, random = read_walks(folder / "source"), np.random.default_rng(seed)
    known = [walk[:, :-2] for walk in walks]
    write_rows(
        folder / "train",
        [one for _ in range(PASSES) for walk in known for one in windows(walk, random)],
    )
    for part, back in (("validation", 1), ("test", 0)):
        ends = [walk[:, : walk.shape[1] - back] for walk in walks]
        rows = [end[:, -LENGTH - 1 :] for end in ends]
        write_rows(folder / part, rows, [end[:, :-1] for end in ends])
    items = 1 + max(int(walk[0].max()) for walk in walks)
    schema = FeatureSchema(
        label="label",
        features=(Feature(name="history", column="past"), Feature(name="item", column="item")),
        sequences=(
            SequenceColumn(name="times", column="times", aligned_with="history"),
            SequenceColumn(name="seen", column="seen"),
        ),
        tables=(EmbeddingConfig(items, DIM, "t_item", feature_names=["history", "item"]),),
    )
    schema.save(folder / "schema.json")


def trained(folder: Path, part: str, seed: int, settings: Sequence[str]) -> dict[str, Scores]:
    """The scores of a run and of the baselines, by name."""
    with tempfile.TemporaryDirectory() as work:
        told = Path(work, "result.json")
        keys = [f"data.train={folder}/train", f"data.eval={folder}/{part}"]
        keys += [f"data.schema={folder}/schema.json", "model.seen=seen"]
        keys += [f"run.seed={seed}", "run.progress=off"]
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
    make_data(folder, seed)
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
        runs = {f"seed {s}": one_seed(Path(made, str(s)), part, s, wanted) for s in args.seeds}
    if args.validate:
        print("\n".join(lines_of(list(runs.values()))))
    else:
        report.show("next_item", runs, lines_of(list(runs.values())))


if __name__ == "__main__":
    main()
