"""What two towers find of the films that users will like, beside what needs no training by steps.

    python -m benchmarks.retrieval [--seeds 0 1 2]

MovieLens-100k, a random tenth held out by each seed. For every user with a held-out rating of 4 or
5, all films that the user has not rated in the training rows are ranked, as in
`jobs.train_two_tower`. Its towers stand beside popularity, item-kNN (cosines of the films' columns
of likes, the nearest ones alone) and EASE (Steck 2019: the ridge regression of every film on all
others, in closed form). Settings were chosen on a further ninth of the training rows of seed 0,
which --validate prints; it never reads the reported tenth.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.quality_films import source, split_further
from jobs import train_two_tower
from jobs.convert_movielens import convert_movielens
from rayrec.data import FeatureSchema
from rayrec.metrics import RankingMetrics
from rayrec.models import rank_scores
from rayrec.runs.held_out import IdColumn, Truth, click_labels, read_rows
from rayrec.runs.retrieval_scores import add_places, places_of

KS = (10, 50)
RIDGES, NEIGHBOURS = (50.0, 100.0, 200.0, 400.0), (20, 40, 80, 160, 320)
DIM = 32  # width of the towers' tables
RIDGE, NEAREST = 200.0, 160  # by --validate
Matrix = NDArray[np.float32]
Scores = dict[str, float]


def likes(folder: Path, part: str, schema: FeatureSchema) -> Matrix:
    """(users, items), 1 where a row of a part has label 1."""
    rows = read_rows(str(folder / part), list(schema.columns()))
    users, items = IdColumn(schema, "user"), IdColumn(schema, "item")
    liked = click_labels(rows, schema, part) == 1
    found = np.zeros((users.size, items.size), np.float32)
    found[users.ids(rows)[liked], items.ids(rows)[liked]] = 1
    return found


def ease(liked: Matrix, ridge: float) -> Matrix:
    """Scores (users, items) by EASE."""
    gram = liked.T @ liked + ridge * np.eye(liked.shape[1], dtype=np.float32)
    inverse = np.linalg.inv(gram)
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return liked @ weights


def item_knn(liked: Matrix, nearest: int) -> Matrix:
    """Scores (users, items) by the cosines of each item's `nearest` neighbours."""
    gram = liked.T @ liked
    norms = np.sqrt(np.maximum(np.diag(gram), 1))
    cosines = gram / norms / norms[:, None]
    np.fill_diagonal(cosines, 0)
    least = np.partition(cosines, -nearest, axis=0)[-nearest]
    return liked @ np.where(cosines >= least, cosines, 0)


def scored(scores: Matrix, truth: Truth) -> Scores:
    """The lists of a matrix of scores, measured as the job measures its own."""
    users = IdColumn(truth.schema, "user").ids(truth.users)
    every, cpu = range(len(users)), torch.device("cpu")
    wanted, seen = (places_of(one, every, truth, cpu) for one in (truth.relevant, truth.seen))
    ranked = torch.from_numpy(scores[users][:, truth.item_ids]).double()
    known = torch.ones(len(truth.item_ids), dtype=torch.bool)
    metrics = RankingMetrics(KS, cpu)
    add_places(metrics, rank_scores(ranked, wanted, seen, known).masked, wanted)
    found = metrics.compute()
    return {f"recall@{k}": found.recall[k] for k in KS} | {f"ndcg@{KS[0]}": found.ndcg[KS[0]]}


def towers(folder: Path, train: str, held_out: str, seed: int, *changes: str) -> dict[str, Scores]:
    """What the job reaches with its defaults, and popularity beside it."""
    with tempfile.TemporaryDirectory() as work:
        result = Path(work, "result.json")
        keys = [f"data.train={folder}/{train}", f"data.eval={folder}/{held_out}"]
        keys += [f"data.schema={folder}/schema.json", f"data.work_dir={work}/w"]
        keys += [f"run.seed={seed}", "model.ks=[10,50]", *changes]
        words = [word for key in keys for word in ("--set", key)]
        assert train_two_tower.main(["--local", "--result", str(result), *words]) == 0
        told = json.loads(result.read_text())
    names = ("recall@10", "recall@50", "ndcg@10")
    return {who: {name: told[who][name] for name in names} for who in ("model", "popularity")}


def one_seed(folder: Path, seed: int) -> dict[str, Scores]:
    """The scores of every system on the held-out tenth of a seed."""
    convert_movielens(source(), folder, seed=seed, dim=DIM)
    schema = FeatureSchema.load(folder / "schema.json")
    truth = Truth.load(str(folder / "train"), str(folder / "eval"), schema, "user", "item")
    liked = likes(folder, "train", schema)
    corrected = towers(folder, "train", "eval", seed)
    plain = towers(folder, "train", "eval", seed, "model.log_q=false")
    return {
        "popularity": corrected["popularity"],
        "two towers, log_q=false": plain["model"],
        "two towers": corrected["model"],
        f"item-kNN, {NEAREST} nearest": scored(item_knn(liked, NEAREST), truth),
        f"EASE, ridge {RIDGE:g}": scored(ease(liked, RIDGE), truth),
    }


def validate(folder: Path) -> None:
    """Print what each setting finds of a ninth of the training rows of seed 0."""
    convert_movielens(source(), folder, seed=0)
    split_further(folder)
    schema = FeatureSchema.load(folder / "schema.json")
    truth = Truth.load(str(folder / "fit"), str(folder / "validation"), schema, "user", "item")
    liked = likes(folder, "fit", schema)
    for ridge in RIDGES:
        print(f"EASE {ridge:g}:", scored(ease(liked, ridge), truth))
    for nearest in NEIGHBOURS:
        print(f"item-kNN {nearest}:", scored(item_knn(liked, nearest), truth))


def lines_of(runs: Sequence[dict[str, Scores]]) -> list[str]:
    """The means over seeds, with their standard deviations, in Markdown."""
    names = list(next(iter(runs[0].values())))
    lines = [f"| {len(runs)} seeds: mean (sd) | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for who in runs[0]:
        cells = [np.array([run[who][name] for run in runs]) for name in names]
        spread = [f"{cell.mean():.4f} ({cell.std(ddof=1):.4f})" for cell in cells]
        lines.append(f"| {who} | {' | '.join(spread)} |")
    return lines


def main() -> None:
    """Run every seed, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--validate", action="store_true", help="print the choice of settings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        if args.validate:
            return validate(Path(made, "films"))
        runs = {f"seed {seed}": one_seed(Path(made, str(seed)), seed) for seed in args.seeds}
    report.show("retrieval", runs, lines_of(list(runs.values())))


if __name__ == "__main__":
    main()
