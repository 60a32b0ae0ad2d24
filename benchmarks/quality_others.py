"""Models of other kinds on MovieLens-100k, beside the recipe of `benchmarks.quality_settings`.

    python -m benchmarks.quality_others [--seeds 0 1 ...] [--validate]

Every system scores the same held-out tenth of each seed, so what is reported is the difference of
each seed, its mean and its standard deviation. Logistic regression and the factorization machine
are plain torch over the same columns: a weight for each id, and for the FM 16 columns more
(Rendle 2010), trained by Adagrad with an L2 penalty of the batch's ids. LightGBM reads every column
as a category, and the genres as 19 flags (`pip install lightgbm`; it is left out where it is
missing). Their settings were chosen by --validate on a ninth of the training rows of seed 0, as the
recipe's were.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import report
from benchmarks.quality_films import source, split_further
from benchmarks.quality_run import Trial, scores_of
from benchmarks.quality_settings import FILMS
from benchmarks.quality_twin import Rows, auc, read
from jobs.convert_movielens import convert_movielens
from rayrec.data import FeatureSchema

System = Callable[[Path, str, str, int], float]


class Machine(nn.Module):
    """A factorization machine; of no columns it is a logistic regression.

    A list counts as the mean of its ids.
    """

    def __init__(self, sizes: list[int], columns: int) -> None:
        super().__init__()
        mode = {"mode": "mean"}
        self.weights = nn.ModuleList(nn.EmbeddingBag(size, 1, **mode) for size in sizes)
        self.factors = nn.ModuleList(nn.EmbeddingBag(size, columns, **mode) for size in sizes)
        self.bias = nn.Parameter(torch.zeros(1))
        for bag in self.weights:
            nn.init.zeros_(bag.weight)
        for bag in self.factors:
            nn.init.normal_(bag.weight, std=0.01)

    def forward(self, ids: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Logits (B,), and the squares of what they read, summed over the batch."""
        linear = torch.stack([bag(*one) for bag, one in zip(self.weights, ids, strict=True)])
        rows = torch.stack([bag(*one) for bag, one in zip(self.factors, ids, strict=True)])
        pairs = (rows.sum(0).pow(2) - rows.pow(2).sum(0)).sum(1) / 2
        logits = self.bias + linear.sum(0).squeeze(1) + pairs
        return logits, linear.pow(2).sum() + rows.pow(2).sum()


def machine(columns: int, decay: float, epochs: int, lr: float = 0.05) -> System:
    """The system that trains a machine of so many columns."""

    def run(folder: Path, train: str, held_out: str, seed: int) -> float:
        torch.manual_seed(seed)
        schema = FeatureSchema.load(folder / "schema.json")
        rows = read(folder / train, schema)
        model = Machine([t.num_embeddings for t in schema.embedding_bag_configs()], columns)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)
        for _ in range(epochs):
            for batch in torch.randperm(len(rows.labels)).split(512):
                logits, squares = model([column.take(batch) for column in rows.ids])
                loss = functional.binary_cross_entropy_with_logits(logits, rows.labels[batch])
                optimizer.zero_grad()
                (loss + decay * squares / len(batch)).backward()
                optimizer.step()
        rows = read(folder / held_out, schema)
        with torch.no_grad():
            logits, _ = model([c.take(torch.arange(len(rows.labels))) for c in rows.ids])
        return auc(logits.double().numpy(), rows.labels.double().numpy())

    return run


def flat(rows: Rows, sizes: list[int]) -> NDArray[np.float64]:
    """(rows, columns): an id as it is, a list as a flag for each id."""
    columns = []
    for column, size in zip(rows.ids, sizes, strict=True):
        lengths = (column.starts[1:] - column.starts[:-1]).numpy()
        if lengths.min() == lengths.max() == 1:
            columns.append(column.values.numpy()[:, None])
            continue
        flags = np.zeros((len(lengths), size))
        flags[np.repeat(np.arange(len(lengths)), lengths), column.values.numpy()] = 1
        columns.append(flags)
    return np.concatenate(columns, axis=1).astype(np.float64)


def trees(leaves: int, rounds: int, lr: float = 0.05) -> System:
    """The system that trains LightGBM."""
    import lightgbm

    def run(folder: Path, train: str, held_out: str, seed: int) -> float:
        schema = FeatureSchema.load(folder / "schema.json")
        sizes = [t.num_embeddings for t in schema.embedding_bag_configs()]
        rows, scored = read(folder / train, schema), read(folder / held_out, schema)
        x = flat(rows, sizes)
        single = [i for i in range(x.shape[1]) if x[:, i].max() > 1]
        options = {"objective": "binary", "num_leaves": leaves, "learning_rate": lr, "seed": seed}
        options |= {"num_threads": 1, "verbosity": -1, "cat_smooth": 20, "max_cat_threshold": 256}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = lightgbm.Dataset(x, rows.labels.numpy(), categorical_feature=single)
            model = lightgbm.train(options, data, rounds)
        predicted = np.asarray(model.predict(flat(scored, sizes)), dtype=np.float64)
        return auc(predicted, scored.labels.double().numpy())

    return run


def recipe(folder: Path, train: str, held_out: str, seed: int) -> float:
    """The recipe of the films, by rayrec."""
    return scores_of(folder, Trial(recipe=FILMS, seed=seed), train, held_out)["auc"]


def systems() -> dict[str, System]:
    """Every system with the settings that --validate chose."""
    found: dict[str, System] = {
        "rayrec": recipe,
        "logistic regression": machine(0, 0.003, 25),
        "FM, 16 columns": machine(16, 0.03, 25),
    }
    try:
        found["LightGBM"] = trees(15, 400)
    except ImportError:
        print("no LightGBM: it is not installed")
    return found


def one_seed(seed: int) -> dict[str, float]:
    """The AUC of every system on the held-out tenth of a seed."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "films")
        convert_movielens(source(), folder, seed=seed)
        scores = {name: run(folder, "train", "eval", seed) for name, run in systems().items()}
    print(seed, scores, flush=True)
    return scores


def validate(folder: Path) -> None:
    """Print what each setting reaches on a ninth of the training rows of seed 0."""
    convert_movielens(source(), folder, seed=0)
    split_further(folder)
    for columns, decays in ((0, (0.003, 0.01, 0.03)), (16, (0.01, 0.03, 0.1))):
        for decay in decays:
            for epochs in (8, 15, 25):
                found = machine(columns, decay, epochs)(folder, "fit", "validation", 0)
                print(f"{columns} columns, decay {decay}, {epochs} epochs: {found:.4f}", flush=True)
    for leaves in (15, 31, 63):
        for rounds in (200, 400, 800):
            found = trees(leaves, rounds)(folder, "fit", "validation", 0)
            print(f"LightGBM, {leaves} leaves, {rounds} rounds: {found:.4f}", flush=True)


def lines_of(runs: dict[str, dict[str, float]]) -> list[str]:
    """Each system's AUC, and how far rayrec is above it on the same rows, in Markdown."""
    names = list(next(iter(runs.values())))
    table = np.array([[run[name] for name in names] for run in runs.values()])
    lines = [f"| {len(runs)} seeds | AUC, mean (sd) | rayrec above it | standard error | wins |"]
    lines.append("|---" * 5 + "|")
    for name, column in zip(names, table.T, strict=True):
        gaps = table[:, 0] - column
        error = gaps.std(ddof=1) / np.sqrt(len(gaps))
        mine = f"{gaps.mean():+.4f} (sd {gaps.std(ddof=1):.4f}) | {error:.4f} | {(gaps > 0).sum()}"
        mine = " | | " if name == names[0] else mine
        lines.append(f"| {name} | {column.mean():.4f} ({column.std(ddof=1):.4f}) | {mine} |")
    return lines


def main() -> None:
    """Run every seed, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(100, 110)))
    text = "seeds at a time, each in a process of one thread"
    parser.add_argument("--processes", type=int, default=2, help=text)
    parser.add_argument("--validate", action="store_true", help="print the choice of settings")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that this one starts
    if args.validate:
        with tempfile.TemporaryDirectory() as made:
            return validate(Path(made, "films"))
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        scores = pool.map(one_seed, args.seeds)
        runs = {f"seed {seed}": one for seed, one in zip(args.seeds, scores, strict=True)}
    report.show("quality_others", runs, lines_of(runs), "quality-films")


if __name__ == "__main__":
    main()
