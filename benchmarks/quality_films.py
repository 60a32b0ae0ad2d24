"""MovieLens-100k for `benchmarks.quality`: AUC of "rates it 4 or 5" on a random tenth.

A seed chooses the tenth, the initial values and the order of the rows. Settings are chosen by
`--validate`, which holds a further ninth of the training rows out, trains on the rest, and never
reads the reported tenth.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.quality_run import Trial, scores_of
from benchmarks.quality_settings import FILMS, Recipe
from jobs.convert_movielens import convert_movielens
from rayrec.errors import ConfigError

SEEDS = (0, 1, 2)


def source() -> Path:
    """The folder of MovieLens-100k below RAYREC_DATA.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(os.environ.get("RAYREC_DATA", "data"), "ml-100k")
    if not folder.is_dir():
        raise ConfigError(
            f"MovieLens-100k is not in {folder}; set RAYREC_DATA to the folder that holds ml-100k."
        )
    return folder


def split_further(folder: Path) -> None:
    """Write train/ of a converted folder as fit/ and validation/, nine rows to one.

    The converter has put the rows in a random order, so the first ninth is a random one.
    """
    table = pq.read_table(folder / "train")
    held_out = table.num_rows // 9
    for part, rows in (("validation", table.slice(0, held_out)), ("fit", table.slice(held_out))):
        (folder / part).mkdir()
        pq.write_table(rows, folder / part / "part-00000.parquet")


def films(
    folder: Path, recipe: Recipe = FILMS, seeds: Sequence[int] = SEEDS
) -> Iterator[tuple[str, float]]:
    """Train once for each seed; gives "seed 0" and so on, and the AUC on its held-out tenth."""
    for seed in seeds:
        data = folder / f"films-{seed}"
        convert_movielens(source(), data, seed=seed)
        trial = Trial(recipe=recipe, seed=seed)
        yield f"seed {seed}", scores_of(data, trial)["auc"]


def validation(folder: Path, recipe: Recipe, seed: int = 0) -> float:
    """The AUC on a tenth of all ratings that lies within the training rows."""
    data = folder / f"films-{seed}"
    if not data.exists():
        convert_movielens(source(), data, seed=seed)
        split_further(data)
    trial = Trial(recipe=recipe, seed=seed)
    scores = scores_of(data, trial, "fit", "validation")
    print(json.dumps({"auc": scores["auc"], "train_loss": scores.get("train_loss")}), flush=True)
    return scores["auc"]
