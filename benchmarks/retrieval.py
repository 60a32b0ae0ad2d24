"""What two towers find of the films that users will like, beside what needs no training by steps.

    python -m benchmarks.retrieval [--seeds 0 1 2]

MovieLens-100k, a random tenth held out by each seed. For every user with a held-out rating of 4 or
5, all films that the user has not rated in the training rows are ranked, as in
`jobs.train_two_tower`. Its towers stand beside popularity, item-kNN (cosines of the films' columns
of likes, the nearest ones alone), ALS (Hu, Koren and Volinsky 2008: factors of users and films in
turns, of likes that weigh more than what is not there) and EASE (Steck 2019: the ridge regression
of every film on all others, in closed form). Settings were chosen on a further ninth of the
training rows of seed 0, which --validate prints; it never reads the reported tenth.

The towers less each of the others: NDCG@10 of the same users, each the mean over the seeds in which
the user is asked for, with a paired bootstrap over users.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.quality_films import source, split_further
from jobs import train_two_tower
from jobs.convert_movielens import convert_movielens
from rayrec.checkpoint import read_manifest, restore_checkpoint
from rayrec.data import FeatureSchema
from rayrec.data.convert import to_batch
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import Topology
from rayrec.metrics import RankingMetrics
from rayrec.metrics.bootstrap import Difference, paired_bootstrap
from rayrec.models import rank_scores
from rayrec.optim import RowWiseAdagrad
from rayrec.planner import manual_plan
from rayrec.runs.held_out import IdColumn, Truth, click_labels, read_rows
from rayrec.runs.retrieval import TwoTowerModel, TwoTowerRecipe
from rayrec.runs.retrieval_scores import add_places, places_of

KS = (10, 50)
RIDGES, NEIGHBOURS = (50.0, 100.0, 200.0, 400.0), (20, 40, 80, 160, 320)
FACTORS, DECAYS, WEIGHTS = (16, 32, 64, 128), (1.0, 10.0, 30.0, 100.0), (1.0, 5.0, 20.0)
ROUNDS = 15  # of ALS
DIM = 32  # width of the towers' tables
RIDGE, NEAREST, ALS = 200.0, 160, (32, 30.0, 5.0)  # by --validate
TOWERS = "two towers"
Matrix = NDArray[np.float32]
Scores = dict[str, float]


class Found(NamedTuple):
    """Scores of a system, and the NDCG@10 of each user that is asked for, by the user's id."""

    scores: Scores
    of_users: dict[int, float]


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
    weights: Matrix = (-inverse / np.diag(inverse)).astype(np.float32)
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


def als(liked: Matrix, factors: int, decay: float, weight: float) -> Matrix:
    """Scores (users, items) by alternating least squares."""
    random = np.random.default_rng(0)
    items = random.normal(0, 0.1, (liked.shape[1], factors)).astype(np.float32)
    for _ in range(ROUNDS):
        users = _solved(liked, items, decay, weight)
        items = _solved(liked.T, users, decay, weight)
    return _solved(liked, items, decay, weight) @ items.T


def _solved(liked: Matrix, others: Matrix, decay: float, weight: float) -> Matrix:
    """Return the best (rows, factors) for the factors of the columns."""
    every = others.T @ others + decay * np.eye(others.shape[1], dtype=np.float32)
    found = np.zeros((len(liked), others.shape[1]), np.float32)
    for number, row in enumerate(liked):
        own = others[row > 0]
        if len(own):
            found[number] = np.linalg.solve(every + weight * own.T @ own, (1 + weight) * own.sum(0))
    return found


def scored(scores: Matrix, truth: Truth) -> Found:
    """The lists of a matrix of scores, measured as the job measures its own."""
    users = IdColumn(truth.schema, "user").ids(truth.users)
    every, cpu = range(len(users)), torch.device("cpu")
    wanted, seen = (places_of(one, every, truth, cpu) for one in (truth.relevant, truth.seen))
    ranked = torch.from_numpy(scores[users][:, truth.item_ids]).double()
    known = torch.ones(len(truth.item_ids), dtype=torch.bool)
    places = rank_scores(ranked, wanted, seen, known).masked
    metrics = RankingMetrics(KS, cpu)
    add_places(metrics, places, wanted)
    found = metrics.compute()
    means = {f"recall@{k}": found.recall[k] for k in KS} | {f"ndcg@{KS[0]}": found.ndcg[KS[0]]}
    of_users = {}
    gains = 1 / np.log2(np.arange(KS[0]) + 2.0)
    for user, of_user in zip(users.tolist(), places.split(wanted.lengths.tolist()), strict=True):
        if len(of_user):
            best = gains[: len(of_user)].sum()
            of_users[user] = float(gains[of_user[of_user < KS[0]].numpy()].sum() / best)
    assert abs(np.mean(list(of_users.values())) - found.ndcg[KS[0]]) < 1e-6
    return Found(means, of_users)


def towers(folder: Path, seed: int, truth: Truth, *changes: str) -> dict[str, Found]:
    """What the job reaches with its defaults, and popularity beside it."""
    with tempfile.TemporaryDirectory() as work:
        result = Path(work, "result.json")
        keys = [f"data.train={folder}/train", f"data.eval={folder}/eval"]
        keys += [f"data.schema={folder}/schema.json", f"data.work_dir={work}/w"]
        keys += [f"run.seed={seed}", "model.ks=[10,50]", f"run.storage_path={work}/runs", *changes]
        words = [word for key in keys for word in ("--set", key)]
        assert train_two_tower.main(["--local", "--result", str(result), *words]) == 0
        told = json.loads(result.read_text())
        found = scored(_scores_of(told["checkpoint"], truth), truth)
    for name, value in found.scores.items():
        assert abs(value - told["model"][name]) < 1e-3, f"{name}: {value}, {told['model'][name]}"
    counts = np.zeros(1 + int(truth.item_ids.max()), np.float32)
    counts[truth.item_ids] = truth.counts
    users = IdColumn(truth.schema, "user").size
    return {TOWERS: found, "popularity": scored(np.tile(counts, (users, 1)), truth)}


def _scores_of(checkpoint: str, truth: Truth) -> Matrix:
    """Scores (users, items) of the towers of a checkpoint, 0 where `truth` lacks one."""
    saved = dict(read_manifest(checkpoint).extras["two_tower"])
    schema = saved.pop("schema")
    tuples = {name: tuple(saved[name]) for name in ("query", "candidate", "layers")}
    module: Any = TwoTowerRecipe(schema=schema, model=TwoTowerModel(**{**saved, **tuples}))()
    tables = truth.schema.embedding_bag_configs()
    model = DistributedModelParallel(
        module,
        plan=manual_plan(tables, "table_wise", Topology.local(1)),
        sparse_optimizer=RowWiseAdagrad(lr=0.1),
    )
    restored = restore_checkpoint(checkpoint, model.shard_states(), tables=tables)
    for name, parameter in model.dense_parameters():
        parameter.data.copy_(restored.dense[name])
    asked, listed = (to_batch(rows, truth.schema) for rows in (truth.users, truth.items))
    with torch.no_grad():
        queries = module.two_tower.query(asked.sparse_features)
        scores = queries @ module.two_tower.candidate(listed.sparse_features).T
    users = IdColumn(truth.schema, "user")
    found = np.zeros((users.size, 1 + int(truth.item_ids.max())), np.float32)
    found[np.ix_(users.ids(truth.users), truth.item_ids)] = scores.numpy()
    return found


def one_seed(folder: Path, seed: int) -> dict[str, Found]:
    """What every system finds of the held-out tenth of a seed."""
    convert_movielens(source(), folder, seed=seed, dim=DIM)
    schema = FeatureSchema.load(folder / "schema.json")
    truth = Truth.load(str(folder / "train"), str(folder / "eval"), schema, "user", "item")
    liked = likes(folder, "train", schema)
    corrected = towers(folder, seed, truth)
    plain = towers(folder, seed, truth, "model.log_q=false")
    factors, decay, weight = ALS
    return {
        "popularity": corrected["popularity"],
        f"{TOWERS}, log_q=false": plain[TOWERS],
        TOWERS: corrected[TOWERS],
        f"item-kNN, {NEAREST} nearest": scored(item_knn(liked, NEAREST), truth),
        f"ALS, {factors} factors": scored(als(liked, factors, decay, weight), truth),
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
        print(f"EASE {ridge:g}:", scored(ease(liked, ridge), truth).scores)
    for nearest in NEIGHBOURS:
        print(f"item-kNN {nearest}:", scored(item_knn(liked, nearest), truth).scores)
    for choice in product(FACTORS, DECAYS, WEIGHTS):
        print(f"ALS {choice}:", scored(als(liked, *choice), truth).scores)


def lines_of(runs: Sequence[dict[str, Found]]) -> list[str]:
    """The means over seeds, with their standard deviations, in Markdown."""
    names = list(runs[0][TOWERS].scores)
    lines = [f"| {len(runs)} seeds: mean (sd) | {' | '.join(names)} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for who in runs[0]:
        cells = [np.array([run[who].scores[name] for run in runs]) for name in names]
        spread = [f"{cell.mean():.4f} ({cell.std(ddof=1):.4f})" for cell in cells]
        lines.append(f"| {who} | {' | '.join(spread)} |")
    return lines


def compared(runs: Sequence[dict[str, Found]]) -> tuple[dict[str, Difference], list[str]]:
    """NDCG@10 of the towers less that of each other system, paired by users."""
    users = sorted({user for run in runs for user in run[TOWERS].of_users})
    lines = ["", f"| {TOWERS} less | NDCG@10 | middle 95% of a bootstrap over {len(users)} users |"]
    lines.append("|---|---|---|")
    found = {}
    for who in runs[0]:
        means = []
        for one in (who, TOWERS):
            kept = [[run[one].of_users[u] for run in runs if u in run[one].of_users] for u in users]
            means.append(np.array([np.mean(of_user) for of_user in kept]))
        if who != TOWERS:
            found[who] = paired_bootstrap(means[0], means[1])
            mean, low, high = found[who]
            lines.append(f"| {who} | {mean:+.4f} | {low:+.4f} to {high:+.4f} |")
    return found, lines


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
        runs = [one_seed(Path(made, str(seed)), seed) for seed in args.seeds]
    differences, lines = compared(runs)
    results = {
        f"seed {seed}": {who: found.scores for who, found in run.items()}
        for seed, run in zip(args.seeds, runs, strict=True)
    }
    less = {who: one._asdict() for who, one in differences.items()}
    report.show("retrieval", results | {f"{TOWERS} less": less}, [*lines_of(runs), *lines])


if __name__ == "__main__":
    main()
