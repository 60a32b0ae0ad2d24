"""Options that a program gives are checked by their annotations, as those of run files are."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, RunConfig, ScalingConfig
from rayrec.data import SyntheticConfig
from rayrec.driver import OptimizerConfig, PublishConfig
from rayrec.errors import ConfigError
from rayrec.fields import kinds
from rayrec.models import TwoTower
from rayrec.optim import WarmupPolicy, WarmupStage
from rayrec.runs.run_file import RunFile
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.optimizer_config import DEFAULT_SPARSE

PACKAGES = ("", ".data", ".driver", ".layout", ".optim", ".planner", ".train")
# results, plans and what the driver tells ranks: nobody writes them by hand
NO_OPTIONS = {"Batch", "Change", "DataReport", "EvaluateTask", "FeatureSchema", "FitOutcome"}
NO_OPTIONS |= {
    "FitTask",
    "NextItemDataset",
    "PlanEstimates",
    "ProgressReport",
    "RankEstimate",
    "Replicated",
}
NO_OPTIONS |= {"Result", "SampleOrder", "Shard", "ShardingPlan", "Storage", "TableEstimate"}
NO_OPTIONS |= {"TableLayout", "TablePlacement", "Topology", "TrainSpec", "NextItemDataset"}
# of the fields without a default
NEEDED: dict[str, Any] = {"global_batch_size": 8, "num_embeddings": 5, "embedding_dim": 4}
NEEDED |= {"name": "a", "lr": 0.1, "path": "x", "column": "c", "max_num_embeddings": 8}
NEEDED |= {"num_items": 5, "count": 2}


def options() -> list[type]:
    """The dataclasses of all options that users give."""
    found: dict[type, None] = {}
    for package in PACKAGES:
        module = import_module(f"rayrec{package}")
        named = [getattr(module, name) for name in module.__all__]
        found.update(dict.fromkeys(filter(dataclasses.is_dataclass, named)))
    return [
        kind for kind in found if kind.__name__ not in NO_OPTIONS and not inspect.isabstract(kind)
    ]


@pytest.mark.parametrize("kind", options())
def test_no_option_takes_an_object_of_another_type(kind: type) -> None:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    needed = {
        name: NEEDED[name]
        for name, field in fields.items()
        if kinds.default_of(field) is dataclasses.MISSING
    }
    for name, type_ in kinds.field_types(kind).items():
        if type_ is not kinds.Code:  # code that only checkers can name
            with pytest.raises(ConfigError, match=rf"^{kind.__name__} has {name}=<object.* must "):
                kind(**needed | {name: object()})


def run(**options: Any) -> Callable[[], RunConfig]:
    return lambda: RunConfig(global_batch_size=8, steps=1, **options)


def tables(name: str) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(name=name, num_embeddings=5, embedding_dim=4, feature_names=[name])
    return EmbeddingBagCollection([table])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (run(evaluation=10), r"evaluation=10; it must be EvaluationConfig\(...\) or None"),
        (run(checkpoint=5), r"checkpoint=5; it must be CheckpointConfig\(...\)"),
        (run(failure=3), r"failure=3; it must be FailureConfig\(...\)"),
        (run(publish=3), r"publish=3; it must be PublishConfig\(...\) or None"),
        (run(profile="x"), r"profile='x'; it must be ProfileConfig\(path=...\) or None"),
        (run(tasks=("a", "b")), r"tasks=\('a', 'b'\); .*each item Task\(name=...\)"),
        (
            run(table_optimizers={"a": 0.1}),
            r"\{'a': 0.1\}; .*each value an instance of SparseOptimizer or OptimizerConfig\(name=",
        ),
        (run(dense_optimizer=torch.optim.Adam), r"Adam'>; it must be OptimizerConfig\(name=...,"),
        (run(dense_schedule=WarmupStage()), r"a list, each item WarmupStage\(...\)"),
        (run(dense_schedule=lambda step: 1.0), r"a list, each item WarmupStage\(...\)"),
        (run(sparse_optimizer=0.1), "sparse_optimizer=0.1; it must be an instance of Sparse"),
        (run(sparse_optimizer="adamm"), "'adamm' is unknown; choose one of sgd"),
        (run(seed=True), "seed=True; it must be a whole number"),
        (run(shuffle=1), "shuffle=1; it must be True or False"),
        (run(extras=[1]), r"extras=\[1\]; it must be a mapping"),
        (run(clip_norm="a"), "clip_norm='a'; it must be a number or None"),
        (lambda: ScalingConfig(num_workers=(1, 2, 3)), "a list of 2: a whole number, a whole"),
        (lambda: WarmupStage(policy="lineer"), "policy='lineer'; it must be one of 'none', 'lin"),
        (lambda: EmbeddingBagConfig(5, 4, "t", feature_names="f"), "'f'; it must be a list"),
        (lambda: PublishConfig(every_n_steps=1, tables={"t": 4}), "each value a text"),
        (lambda: SyntheticConfig(rows_train="9"), "rows_train='9'; it must be a whole number"),
        (lambda: TwoTower(tables("q"), tables("c"), [32]), "TwoTower has layer_sizes=Emb.*a list"),
        (lambda: CheckpointConfig(every_n_steps="\n" * 99 + "x" * 99), r"^.{0,150}whole number"),
    ],
)
def test_a_wrong_type_is_one_line_that_says_what_the_option_takes(
    make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        make()
    assert "\n" not in str(told.value)


def test_a_program_may_say_the_words_of_run_files() -> None:
    said = RunConfig(
        global_batch_size=np.int64(8),
        steps=1,
        sparse_optimizer="adam",
        dense_optimizer="sgd",
        clip_norm=np.float32(0.5),
        storage_path=Path("/tmp/runs"),
        sparse_schedule=[WarmupStage(policy="constant", value=0.5)],
    )
    changes = ["run.global_batch_size=8", "run.steps=1", "run.clip_norm=0.5"]
    changes += ["run.sparse_optimizer=adam", "run.dense_optimizer=sgd"]
    changes += ["run.storage_path=/tmp/runs"]
    changes += ['run.sparse_schedule=[{policy = "constant", value = 0.5}]']
    read = RunFile.read(None, changes).run
    rates = {"sparse_optimizer": read.sparse_optimizer, "dense_optimizer": read.dense_optimizer}
    assert dataclasses.replace(said, **rates) == read
    assert said.sparse_optimizer == OptimizerConfig(name="adam", lr=1e-3)
    assert rates["dense_optimizer"].name == "sgd"
    assert said.sparse_schedule[0].policy is WarmupPolicy.CONSTANT
    assert type(said.global_batch_size) is int and type(said.storage_path) is str


def test_what_fits_is_kept_as_it_is() -> None:
    names, own = ["f"], {"t": DEFAULT_SPARSE}
    table = EmbeddingBagConfig(num_embeddings=5, embedding_dim=4, name="t", feature_names=names)
    assert table.feature_names is names
    assert RunConfig(global_batch_size=8, steps=1, table_optimizers=own).table_optimizers is own
