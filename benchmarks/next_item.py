"""What next-item models find of the film that a user rates next, beside what needs no training.

    python -m benchmarks.next_item [--seeds 0 1 ...] [--validate] [--systems hstu ...] [--work DIR]

MovieLens-100k, leave one out: the last rating of every user is the test, the one before it the
validation, and all items are ranked for both. Figures depend on the protocol, so both are told:
films that the user has rated kept in the list, or masked. They also depend on the rule for ratings
of equal time, which 44% of the users have at their end: that of `jobs.convert_movielens` is the
order of the file. A model is trained on all ratings before these two, in windows that are cut at
random twelve times. Settings were chosen on the validation; --validate prints its figures alone.

The models are compared with the Markov chain user by user: a score is the mean over the seeds and
over the queries of a user, and the users are drawn again and again (`rayrec.metrics.bootstrap`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from rayrec.metrics.bootstrap import gains, paired_bootstrap
from rayrec.runs.ranked_queries import FILE, PROTOCOLS, read_places

LENGTH, DIM, PASSES = 50, 64, 12
SYSTEMS: dict[str, tuple[str, ...]] = {
    "GRU4Rec, sampled softmax": ("model=gru4rec",),
    "SASRec, full softmax": ("model=sasrec", "loss=full"),
    "SASRec, sampled softmax": ("model=sasrec",),
    "SASRec, sampled softmax, popularity": ("model=sasrec", "proposal=popularity"),
    "SASRec, items of the batch": ("model=sasrec", "loss=in_batch"),
    "HSTU, full softmax": ("model=hstu", "times=times", "loss=full"),
    "HSTU, sampled softmax": ("model=hstu", "times=times"),
    "HSTU, sampled softmax, mixed": ("model=hstu", "times=times", "proposal=mixed"),
}
MARKOV = "Markov chain, last 5 films"
BASELINES = {"popularity": "popularity", "markov": MARKOV}
PARTS = ("validation", "test")
METRICS = ("hr@10", "ndcg@10")
NAMES = tuple(f"{protocol} {metric}" for protocol in PROTOCOLS for metric in METRICS)
Gains = dict[str, NDArray[np.float64]]  # (parts, users) by name


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
    """Write train/, eval/ with the validation and then the test, and schema.json."""
    walks, random = read_walks(folder / "source"), np.random.default_rng(seed)
    known = [walk[:, :-2] for walk in walks]
    write_rows(
        folder / "train",
        [one for _ in range(PASSES) for walk in known for one in windows(walk, random)],
    )
    ends = [walk[:, : walk.shape[1] - back] for back in (1, 0) for walk in walks]
    rows = [end[:, -LENGTH - 1 :] for end in ends]
    write_rows(folder / "eval", rows, [end[:, :-1] for end in ends])
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


def gains_of(folder: Path, name: str, seed: int, settings: Sequence[str]) -> dict[str, Gains]:
    """Return the gains of a run and of the baselines by name; a run that is there is not made."""
    if not (folder / name / FILE).exists():
        keys = [f"data.train={folder}/train", f"data.eval={folder}/eval"]
        keys += [f"data.schema={folder}/schema.json", "model.seen=seen"]
        keys += [f"run.storage_path={folder}", f"run.name={name}"]
        keys += [f"run.seed={seed}", "run.progress=off"]
        keys += [f"model.{setting}" for setting in settings]
        words = [word for key in keys for word in ("--set", key)]
        assert rayrec(["train", "--local", *words]) == 0
    places = read_places(str(folder / name))
    assert places is not None
    names = {"model": PROTOCOLS}
    names |= {t: tuple(f"{key} {p}" for p in PROTOCOLS) for key, t in BASELINES.items()}
    found: dict[str, Gains] = {title: {} for title in names}
    for title, own in names.items():
        for protocol, kept in zip(PROTOCOLS, own, strict=True):
            for metric, gain in zip(METRICS, gains(places[kept], 10), strict=True):
                found[title][f"{protocol} {metric}"] = gain.reshape(len(PARTS), -1)
    return found


def one_seed(folder: Path, seed: int, systems: Sequence[str], part: int) -> dict[str, Gains]:
    """Return the gains of every system with a seed, and of the baselines; print those of a part."""
    found: dict[str, Gains] = {}
    if not (folder / "schema.json").exists():
        make_data(folder, seed)
    for system in systems:
        of_run = gains_of(
            folder, system.replace(", ", "-").replace(" ", "-"), seed, SYSTEMS[system]
        )
        found[system] = of_run.pop("model")
        found = of_run | found
        told = {name: round(float(gain[part].mean()), 4) for name, gain in found[system].items()}
        print(f"seed {seed}, {system}, {PARTS[part]}: {told}", flush=True)
    return found


def scores_of(run: dict[str, Gains], part: int) -> dict[str, dict[str, float]]:
    """Return the scores of a part of the queries, by system and name."""
    return {
        who: {name: float(gain[part].mean()) for name, gain in gains.items()}
        for who, gains in run.items()
    }


def lines_of(runs: Sequence[dict[str, dict[str, float]]]) -> list[str]:
    """Return the means over seeds, with their standard deviations, in Markdown."""
    lines = [f"| {len(runs)} seeds: mean (sd) | {' | '.join(NAMES)} |"]
    lines.append("|---" * (len(NAMES) + 1) + "|")
    for who in runs[0]:
        cells = [np.array([run[who][name] for run in runs]) for name in NAMES]
        spread = [
            f"{cell.mean():.4f} ({cell.std(ddof=min(1, len(cell) - 1)):.4f})" for cell in cells
        ]
        lines.append(f"| {who} | {' | '.join(spread)} |")
    return lines


def differences(
    runs: Sequence[dict[str, Gains]], parts: slice
) -> dict[str, dict[str, list[float]]]:
    """Return what each model gains over the Markov chain: the mean and the middle 95%."""

    def of_users(who: str, name: str) -> NDArray[np.float64]:
        return np.mean([run[who][name][parts].mean(axis=0) for run in runs], axis=0)

    return {
        who: {
            name: [*paired_bootstrap(of_users(MARKOV, name), of_users(who, name))] for name in NAMES
        }
        for who in runs[0]
        if who not in BASELINES.values()
    }


def difference_lines(title: str, found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the differences in Markdown."""
    lines = ["", f"| less the Markov chain, {title} | {' | '.join(NAMES)} |"]
    lines.append("|---" * (len(NAMES) + 1) + "|")
    for who, by_name in found.items():
        cells = [f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" for mean, low, high in by_name.values()]
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Run every seed, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--validate", action="store_true", help="print the validation's figures")
    parser.add_argument("--systems", nargs="+", default=[""], help="parts of names of systems")
    parser.add_argument("--work", type=Path, help="keep the runs here, and use those that are here")
    args = parser.parse_args()
    wanted = [name for name in SYSTEMS if any(word in name.lower() for word in args.systems)]
    with tempfile.TemporaryDirectory() as made:
        work, part = args.work or Path(made), 0 if args.validate else 1
        runs = [one_seed(work / str(seed), seed, wanted, part) for seed in args.seeds]
    if args.validate:
        print("\n".join(lines_of([scores_of(run, 0) for run in runs])))
        return
    tests = [scores_of(run, 1) for run in runs]
    results: dict[str, Any] = {f"seed {s}": one for s, one in zip(args.seeds, tests, strict=True)}
    lines = lines_of(tests)
    for title, parts in (("test", slice(1, 2)), ("validation and test", slice(2))):
        results[f"less the Markov chain, {title}"] = found = differences(runs, parts)
        lines += difference_lines(title, found)
    lines.append(
        "\nThe first table is of the test. A difference is of scores that are means over the seeds "
        "and the queries of a user, with the middle 95% of a bootstrap of the users. Settings of "
        "the models were chosen on the validation."
    )
    report.show("next_item", results, lines)


if __name__ == "__main__":
    main()
