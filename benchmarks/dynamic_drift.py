"""What a dynamic table learns in a world whose ids are born and die, against hashing.

Rows come in the order of time, each is trained on once, and the rows after them are scored once.
Regret is the log loss of the model above that of the true probabilities of the same rows. Hashed
tables have `LARGE` rows for each id that is alive at a time, the dynamic ones a fifth of them, and
others are hashed into as many rows as the dynamic ones, or into as many bytes. The learning rates
were chosen for each system by `choose`, on another seed than those of the reported rows:

    python -m benchmarks.dynamic_drift [part of the names of the systems]

Where TorchRec is installed, its managed collisions take part (`benchmarks.dynamic_mch`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.quality_run import Trial, run_config
from benchmarks.quality_settings import Recipe
from rayrec.data.planted import SyntheticConfig
from rayrec.layout import DynamicConfig
from rayrec.layout.schema import FeatureSchema
from rayrec.train.optimizer_config import OptimizerConfig

LARGE, SHARE = 10, 5  # rows of a hashed table for each living id; one in so many for the dynamic
WORLD = SyntheticConfig(
    rows_train=300_000, rows_eval=30_000, num_features=8, num_lists=0, num_dense=4, lifetime=60_000
)
MCH_ROW_BYTES = 3 * 8  # an id, its row, its last step; the ids of a step are not counted
CHOICE_SEED, SEEDS, RATES = 100, (1, 2, 3), (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
WITHOUT_TORCHREC = "TorchRec's managed collisions take no part: TorchRec is not importable here."
WITH_TORCHREC = (
    "TorchRec's MCH is its unsharded module on one process, since its sharder of bags with managed "
    "collisions takes no CPU (meta-pytorch/torchrec#2958); it evicts by LRU in every step. The "
    "unsharded module leaves a row as it was when another id takes it; the sharded one starts it "
    "anew, with its state, as the rows marked so do here."
)


@dataclass(frozen=True, kw_only=True)
class System:
    """How ids become rows.

    Attributes:
        kind: a dynamic table, one that ids are hashed into, or one of TorchRec's MCH, in which a
            row that goes to another id stays as it was, or starts anew.
        rows: for each id that is alive at a time.
        lr: of the tables.
    """

    kind: Literal["dynamic", "hashed", "mch", "mch, anew"]
    rows: float
    lr: float

    def schema(self, made: FeatureSchema) -> FeatureSchema:
        """The schema of the world, whose tables have two rows for each living id."""
        features, tables = [], []
        for feature, table in zip(made.features, made.tables, strict=True):
            rows = int(table.num_embeddings / 2 * self.rows)
            dynamic = None if self.kind == "hashed" else table.dynamic
            buckets = rows if self.kind == "hashed" else None
            tables.append(replace(table, num_embeddings=rows, dynamic=dynamic))
            features.append(replace(feature, hash_buckets=buckets))
        return replace(made, features=tuple(features), tables=tuple(tables))


def systems() -> dict[str, System]:
    """The systems of rayrec by name, with the rates that were chosen."""
    row_bytes = 4 * WORLD.dim + 4  # and the state of row-wise Adagrad
    small = LARGE / SHARE
    same_bytes = small * (row_bytes + DynamicConfig().row_bytes(small)) / row_bytes
    return {
        "hashed, all rows": System(kind="hashed", rows=LARGE, lr=0.2),
        "dynamic, 20% of the rows": System(kind="dynamic", rows=small, lr=0.025),
        "hashed, the dynamic table's rows": System(kind="hashed", rows=small, lr=0.8),
        "hashed, the dynamic table's bytes": System(kind="hashed", rows=same_bytes, lr=0.4),
    }


def torchrec_systems() -> dict[str, System]:
    """The systems of TorchRec, of the rows or of the bytes of the dynamic one."""
    small, row_bytes = LARGE / SHARE, 4 * WORLD.dim + 4
    same_bytes = (
        small * (row_bytes + DynamicConfig().row_bytes(small)) / (row_bytes + MCH_ROW_BYTES)
    )
    return {
        "TorchRec's MCH, the dynamic table's rows": System(kind="mch", rows=small, lr=0.1),
        "TorchRec's MCH, the dynamic table's bytes": System(kind="mch", rows=same_bytes, lr=0.2),
        "TorchRec's MCH, anew, the dynamic table's rows": System(
            kind="mch, anew", rows=small, lr=0.025
        ),
        "TorchRec's MCH, anew, the dynamic table's bytes": System(
            kind="mch, anew", rows=same_bytes, lr=0.025
        ),
    }


def all_systems() -> dict[str, System]:
    """The systems that can be run here."""
    return systems() | (torchrec_systems() if has_torchrec() else {})


def has_torchrec() -> bool:
    """True if TorchRec is installed."""
    return importlib.util.find_spec("torchrec") is not None


def regret_of(folder: Path, system: System, seed: int) -> float:
    """Train on the rows in their order, and score those after them."""
    from rayrec.data import ParquetDataset
    from rayrec.driver import Driver, ScalingConfig
    from rayrec.metrics import PlantedScores
    from rayrec.recipe import ModelRecipe

    recipe = Recipe(
        tables=OptimizerConfig(name="rowwise_adagrad", lr=system.lr),
        dense=OptimizerConfig(name="adam", lr=3e-3),
        batch=1024,
        decay="constant",
    )
    schema = system.schema(FeatureSchema.load(folder / "schema.json"))
    train, held_out = (
        ParquetDataset(folder / part, schema, num_streams=1) for part in ("train", "eval")
    )
    trial = Trial(recipe=recipe, seed=seed, options={"shuffle": False})
    model = ModelRecipe(model="dlrm", schema=schema.to_json(), init_bound=0.05)
    truth = PlantedScores.load(folder / "truth.json")
    if system.kind in ("mch", "mch, anew"):
        from benchmarks.dynamic_mch import logloss_of

        found = logloss_of(model, train, held_out, trial, system.kind == "mch, anew")
        return found - truth.bayes_logloss
    config = run_config(trial, train.num_rows)
    result = Driver(model, train, ScalingConfig(num_workers=0), config, eval_data=held_out).fit()
    return float(result.metrics["logloss"]) - truth.bayes_logloss


def choose(part: str = "") -> None:
    """Print the regret of the systems whose names have such a part by learning rate, on a seed that
    is not reported.
    """
    from rayrec.data.synthetic import write_synthetic

    with tempfile.TemporaryDirectory() as made:
        write_synthetic(made, replace(WORLD, seed=CHOICE_SEED))
        for name, system in all_systems().items():
            if part not in name:
                continue
            for lr in RATES:
                found = regret_of(Path(made), replace(system, lr=lr), 0)
                print(f"{name}, lr {lr}: {found:.4f}", flush=True)


def drift() -> tuple[dict[str, Any], list[str]]:
    """Results and a table: regret of every system on every seed."""
    from rayrec.data.synthetic import write_synthetic

    compared = all_systems()
    found: dict[str, list[float]] = {name: [] for name in compared}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as made:
            write_synthetic(made, replace(WORLD, seed=seed))
            for name, system in compared.items():
                found[name].append(regret_of(Path(made), system, seed))
                print(f"seed {seed}, {name}: {found[name][-1]:.4f}", flush=True)
    lines = ["| drifting world | rows for a living id | lr | log loss above the truth, mean (sd) |"]
    lines.append("|---" * 4 + "|")
    for name, system in compared.items():
        mean, sd = np.mean(found[name]), np.std(found[name], ddof=1)
        lines.append(f"| {name} | {system.rows:.1f} | {system.lr:g} | {mean:.4f} ({sd:.4f}) |")
    own = "dynamic, 20% of the rows"
    for name in [name for name in found if name != own]:
        gap = np.array(found[name]) - np.array(found[own])
        lines += [
            "",
            f"{name}, above the dynamic table: {gap.mean():+.4f} (sd {gap.std(ddof=1):.4f})",
        ]
    lines += ["", f"Seeds {SEEDS}, rates chosen on seed {CHOICE_SEED}. `{WORLD}`"]
    lines += ["", WITH_TORCHREC if has_torchrec() else WITHOUT_TORCHREC]
    return found, lines


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    choose(*sys.argv[1:2])
