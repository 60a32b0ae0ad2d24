"""Does training learn what there is to learn? Regret on planted data, and AUC on MovieLens-100k.

    python -m benchmarks.quality [--only kinds optimizers wires dense films] [--rows 1000000]

Planted data state the AUC of their true click probabilities on the held-out rows; regret is that
AUC minus the model's. Every row of the tables is one training run that is scored once, at its end:
by each sharding kind on two ranks and on one rank, by each optimizer of the tables, by each type on
the wire between two ranks that do not share memory, and by each type of the dense layers. No
training can reach the truth where rows are too few for the ids. So the default data have 12 columns
of ids (`--columns`) with at most 200 ids each (`--cap`); 26 and 2000 are those of `rayrec
make-data`. The recipes were tuned on the reported rows, so the level of regret is a fit;
`benchmarks.quality_seeds` has what they reach on other seeds of the data. `--only` runs some parts
and keeps what the newest file of this machine says of the others; `--runs` does the same with the
rows of a part.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.quality_run import Trial, driver_of, schema_of, scores_of
from benchmarks.quality_settings import FILMS, OPTIMIZERS, PLANTED
from rayrec.layout import ShardingPlan, TableLayout, TablePlacement, even_cuts
from rayrec.layout.kinds import KINDS
from rayrec.spec.optimizers import SPARSE_OPTIMIZERS
from rayrec.spec.wire import WIRE_PRECISIONS

RANKS = 2
# The first and the last are of rows on which the recipes were chosen: they show that nothing became
# worse, not what others may expect.
GOAL, WIRE_GOAL, DENSE_GOAL, FILMS_GOAL = 0.005, 0.001, 0.0005, 0.79
Scores = dict[str, float]


def grid(folder: Path) -> ShardingPlan:
    """Every table as two row blocks by two column blocks, whose owners alternate.

    The planner's grid_shard needs several hosts; this is its exchange on two ranks of one host.
    """
    placements = {}
    for table in schema_of(folder, PLANTED).embedding_bag_configs():
        rows, columns = even_cuts(table.num_embeddings, RANKS), even_cuts(table.embedding_dim, 2, 4)
        owners = tuple(tuple((i + j) % RANKS for j in range(2)) for i in range(len(rows) - 1))
        placements[table.name] = TablePlacement(TableLayout(rows, columns, owners))
    return ShardingPlan(world_size=RANKS, tables=placements)


def kinds(folder: Path) -> dict[str, Trial]:
    """One rank, and every kind on two."""
    trials = {"one rank": Trial(recipe=PLANTED)}
    for kind in KINDS:
        plan = grid(folder) if kind == "grid_shard" else kind
        trials[kind] = Trial(recipe=PLANTED, ranks=RANKS, plan=plan)
    return trials


def optimizers(folder: Path) -> dict[str, Trial]:
    """Every optimizer of the tables with the settings it was tuned to, on one rank."""
    return {name: Trial(recipe=OPTIMIZERS[name]) for name in SPARSE_OPTIMIZERS}


def wires(folder: Path) -> dict[str, Trial]:
    """Every type of rows and gradients between two ranks."""
    trials = {}
    for name in WIRE_PRECISIONS:
        wire = {"qcomms_forward": name, "qcomms_backward": name, "share_tables": False}
        trials[name] = Trial(recipe=PLANTED, ranks=RANKS, plan="row_wise", options=wire)
    return trials


def dense(folder: Path) -> dict[str, Trial]:
    """Both types of the dense layers' products, on one rank."""
    narrow = Trial(recipe=PLANTED, options={"dense_dtype": "bfloat16"})
    return {"float32": Trial(recipe=PLANTED), "bfloat16": narrow}


PARTS: dict[str, Callable[[Path], dict[str, Trial]]] = {
    "kinds": kinds,
    "optimizers": optimizers,
    "wires": wires,
    "dense": dense,
}


def planted(
    folder: Path, trials: Mapping[str, Trial], done: dict[str, Scores]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Train and score each trial; gives its name and its scores, and prints a line.

    Args:
        done: scores by what was trained; equal trials of one process are trained once.
    """
    from rayrec.metrics.truth import PlantedScores

    truth = PlantedScores.load(folder / "truth.json")
    first = next((trial for trial in trials.values() if trial.ranks), None)
    with nullcontext() if first is None else driver_of(folder, first).cluster():
        for name, trial in trials.items():
            key = repr(trial)
            scores = done[key] if key in done else scores_of(folder, trial)
            done[key] = scores
            regret = truth.bayes_auc - scores["auc"]
            print(f"{name}: regret {regret:.4f}, {scores['seconds']:.0f} s", flush=True)
            yield name, scores | {"regret": regret, "ne_above": scores["ne"] - truth.bayes_ne}


def lines_of(results: Mapping[str, Any]) -> list[str]:
    """The tables in Markdown, of the parts that were run."""
    lines = []
    for part, names in (("kinds", "kind, 2 ranks"), ("optimizers", "optimizer of the tables")):
        if part in results:
            lines += _table(names, results[part]["runs"], f"at most {GOAL}, chosen on these rows")
    for part, reference, goal in (("wires", "fp32", WIRE_GOAL), ("dense", "float32", DENSE_GOAL)):
        if part in results:
            lines += _table(part, results[part]["runs"], f"{reference} + {goal}", reference)
    if "films" in results:
        scores = results["films"]["runs"].values()
        mean = sum(scores) / len(scores)
        lines += [
            f"MovieLens-100k: AUC {mean:.4f} ({min(scores):.4f} to {max(scores):.4f}, "
            f"{len(scores)} seeds), goal at least {FILMS_GOAL}, chosen on these rows.",
            "",
        ]
    lines += [f"{part}: {about['of']}, {about['date']}." for part, about in results.items()]
    return [*lines, "", *settings()]


def settings() -> list[str]:
    """The settings of the optimizers, and both recipes, in Markdown."""
    lines = ["| optimizer of the tables | lr | options | batch | epochs |", "|---" * 5 + "|"]
    for name, recipe in OPTIMIZERS.items():
        said = recipe.tables
        options = ", ".join(f"{option}={value}" for option, value in said.options.items())
        lines.append(
            f"| {name} | {said.lr:g} | {options or 'its defaults'} | {recipe.batch} | "
            f"{recipe.epochs} |"
        )
    for about, recipe in (("Planted data", PLANTED), ("MovieLens-100k", FILMS)):
        lines += ["", f"{about}: `{recipe}`"]
    return lines


def _table(
    names: str, runs: Mapping[str, Any], goal: str, reference: str | None = None
) -> list[str]:
    """Rows of name, AUC, regret (goal in the heading), NE above the truth's, seconds."""
    versus = "" if reference is None else f" above {reference} |"
    lines = [f"| {names} | AUC | regret, goal {goal} |{versus} NE above the best | s |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for name, run in runs.items():
        above = ""
        if reference is not None:
            above = f" {run['regret'] - runs[reference]['regret']:+.5f} |"
        lines.append(
            f"| {name} | {run['auc']:.4f} | {run['regret']:.4f} |{above} {run['ne_above']:.4f} | "
            f"{run['seconds']:.0f} |"
        )
    return [*lines, ""]


def earlier() -> dict[str, Any]:
    """The parts of the newest file of this machine."""
    files = sorted(report.RESULTS.glob(f"quality-{report.hardware()}-*.json"))
    return dict(json.loads(files[-1].read_text())["results"]) if files else {}


_begun: set[str] = set()  # parts that this process has written to


def keep(part: str, about: str, name: str, run: Any, add: bool) -> None:
    """Write one run into the newest file, beside the other parts.

    Args:
        add: keep the part's other runs of earlier processes, too.
    """
    with Path(tempfile.gettempdir(), "rayrec-quality.lock").open("a") as lock:
        # Two processes may each run some rows; neither shall lose what the other has written.
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = earlier()
        runs = results.get(part, {}).get("runs", {}) if add or part in _begun else {}
        _begun.add(part)
        said = {"of": about, "date": date.today().isoformat(), "runs": runs | {name: run}}
        results = results | {part: said}
        report.write("quality", results, "\n".join(lines_of(results)))


def main() -> None:
    """Run the parts, print and write after each."""
    parser = report.parser(__doc__)
    every = [*PARTS, "films"]
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--runs", nargs="+", help="only these rows of the tables of --only")
    parser.add_argument("--rows", type=int, default=1_000_000, help="planted rows to train on")
    parser.add_argument("--columns", type=int, default=12, help="columns of ids")
    parser.add_argument("--cap", type=int, default=200, help="most distinct ids of a column")
    parser.add_argument("--data", type=Path, help="planted data that lie here already")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from benchmarks.quality_films import films
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import write_synthetic

    torch.set_num_threads(1)
    done: dict[str, Scores] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = args.data or Path(made, "planted")
        if args.data is None and args.only != ["films"]:
            config = SyntheticConfig(rows_train=args.rows, num_features=args.columns, cap=args.cap)
            write_synthetic(folder, config)
        for part in args.only:
            about = "three seeds, each with its own held-out tenth"
            if part == "films":
                scores = iter(films(Path(made)))
            else:
                planned = json.loads((folder / "truth.json").read_text())["config"]
                about = f"{planned['rows_train']} rows, {planned['num_features']} columns of ids, "
                about += f"at most {planned['cap']} ids each"
                trials = PARTS[part](folder)
                wanted = {n: trial for n, trial in trials.items() if n in (args.runs or trials)}
                scores = planted(folder, wanted, done)
            for name, run in scores:  # what is done is kept when a later run fails
                keep(part, about, name, run, args.runs is not None)
    report.show("quality", earlier(), lines_of(earlier()))


if __name__ == "__main__":
    main()
