"""The values that the files of `tests/golden` hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from rayrec.checkpoint.entries import Checksum, Column, DenseEntry, FileEntry, Parent, TableEntry
from rayrec.checkpoint.manifest import Manifest as CheckpointManifest
from rayrec.driver import RunConfig, ScalingConfig
from rayrec.layout import (
    DataType,
    EmbeddingBagConfig,
    PoolingType,
    Replicated,
    ShardingPlan,
    TableLayout,
    TablePlacement,
    Topology,
)
from rayrec.layout.estimates import PlanEstimates, RankEstimate, TableEstimate
from rayrec.layout.plan import Storage
from rayrec.layout.rates import PartRates, Rates
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import DenseColumn, Feature
from rayrec.optim import Adam
from rayrec.planner.constraints import ParameterConstraints
from rayrec.quant import QuantType
from rayrec.recipe import ModelRecipe
from rayrec.runs.run_file import DataSection, PlanSection, RunFile
from rayrec.serve.chain.publication import ChangedTable, Publication
from rayrec.serve.compiled import Target
from rayrec.serve.files import StoredFile
from rayrec.serve.manifest import Manifest as ArtifactManifest
from rayrec.serve.manifest import StoredCode, StoredCollection, StoredTable
from rayrec.spec.schedule import WarmupPolicy, WarmupStage
from rayrec.train.checkpoint_config import CheckpointConfig

TOPOLOGY = Topology(
    hosts=((0, 1), (2, 3)),
    memory_bytes=(1 << 30, 1 << 30, 1 << 31, 1 << 31),
    device="cuda",
    memory_bw=1.25e12,
    rates=Rates(input=PartRates(fixed_s=1e-5, slot_s=2e-7), step_s=0.0001),
    input_hidden=0.5,
)
RANK = RankEstimate(
    weight_bytes=6400,
    optimizer_bytes=400,
    buffer_bytes=8192,
    input_s=1e-4,
    lookup_s=2.5e-5,
    output_s=0.0,
    gradient_s=3e-5,
    update_s=1.0,
    overhead_s=1e-3,
)
NO_OTHER: Any = {"runner_up": None, "runner_up_work_s": None}
ESTIMATES = PlanEstimates(
    topology=TOPOLOGY,
    batch_size=128,
    sparse_optimizer="adagrad",
    ranks=(RANK,) * 4,
    tables={
        "user": TableEstimate(
            kind="row_wise",
            data_type="FP32",
            weight_bytes=25600,
            why="least work",
            work_s=1e-4,
            **NO_OTHER,
        ),
        "größe": TableEstimate(
            kind="data_parallel",
            data_type="FP16",
            weight_bytes=448,
            why="even ranks",
            work_s=2.0,
            runner_up="table_wise",
            runner_up_work_s=2.5,
        ),
        "item": TableEstimate(
            kind="table_wise",
            data_type="BF16",
            weight_bytes=1,
            why="forced",
            work_s=0.0,
            **NO_OTHER,
        ),
    },
)
USER = TableLayout((0, 25, 50, 75, 100), (0, 32, 64), ((0, 1), (1, 2), (2, 3), (3, 0)))
PLAN = ShardingPlan(
    world_size=4,
    hosts=((0, 1), (2, 3)),
    tables={
        "user": TablePlacement(USER, Storage("cached", 0.2)),
        "größe": TablePlacement(Replicated(7, 16, (0, 1, 2, 3))),
        "item": TablePlacement(TableLayout((0, 9), (0, 6), ((3,),)), Storage("host")),
    },
    estimates=ESTIMATES,
)
BARE_PLAN = ShardingPlan(world_size=4, hosts=PLAN.hosts, tables=PLAN.tables)
SCHEMA = FeatureSchema(
    label=("click", "buy"),
    weight="importance",
    dense=(DenseColumn(column="age"), DenseColumn(column="price", fill=-1.5)),
    groups=("user_id",),
    features=(
        Feature(name="user", column="user_id"),
        Feature(name="städte", column="city", hash_buckets=100),
        Feature(name="seen", column="items", weights="seen_w"),
    ),
    tables=(
        EmbeddingBagConfig(500, 16, "t_user", feature_names=["user", "seen"]),
        EmbeddingBagConfig(
            100,
            15,
            "t_city",
            DataType.BF16,
            ["städte"],
            weight_init_min=-0.5,
            weight_init_max=0.01,
            pooling=PoolingType.MEAN,
        ),
    ),
)
SMALL_SCHEMA = FeatureSchema(
    label="click",
    features=(Feature(name="user", column="user_id"),),
    tables=(EmbeddingBagConfig(5, 4, "t_user", feature_names=["user"]),),
)
CONSTRAINTS = {
    "user": ParameterConstraints(kinds=["row_wise", "table_row_wise"], pooling_factor=12.5),
    "item": ParameterConstraints(
        hosts=[0],
        ranks=[0, 1],
        together="items",
        min_partition=32,
        weighted=True,
        skew=1,
        storage="cached",
        cache_load_factor=0.5,
    ),
    "city": ParameterConstraints(apart="big"),
}


def _shard(number: int, rows: range, cols: range, **of_increment: Any) -> FileEntry:
    columns = (Column("weight", "float32", len(cols)), Column("momentum", "float32", 0))
    return FileEntry(
        path=f"tables/0000-user-{number}.arrow",
        table="user",
        rows=rows,
        cols=cols,
        columns=columns,
        bytes=1500,
        crc32=7,
        batch_rows=20,
        marks=(Checksum(512, 123456789), Checksum(1024, 4294967295), Checksum(1500, 7)),
        **of_increment,
    )


_RECTANGLES = [(range(r, r + 25), range(c, c + 32)) for r in range(0, 100, 25) for c in (0, 32)]
SAVED: dict[str, Any] = {
    "step": 1200,
    "world_size": 4,
    "tables": (TableEntry("user", 100, 64, "FP32"),),
    "dense": DenseEntry("dense.pt", 4321, 99),
    "plan": json.loads(BARE_PLAN.to_json()),
    "cursor": {"epoch": 1, "rows": 153600, "shuffle": None},
    "optimizers": {"user": {"kind": "adam", "lr": 0.01, "betas": [0.9, 0.999]}},
    "extras": {"seed": 7, "best": {"step": 1000, "score": 0.75}, "straße": "ä"},
}
WHOLE = CheckpointManifest(
    **SAVED, files=tuple(_shard(i, *cells) for i, cells in enumerate(_RECTANGLES))
)
_OF_IDS = (Column("row", "int64", 0), Column("id_key", "int64", 0))
IN_USE = CheckpointManifest(
    **SAVED,
    files=tuple(
        replace(entry, columns=(*_OF_IDS, *entry.columns), live=(3, 0)) for entry in WHOLE.files
    ),
)
INCREMENT = CheckpointManifest(
    **SAVED,
    files=tuple(
        _shard(i, *cells, held=3, firsts=(cells[0].start,)) for i, cells in enumerate(_RECTANGLES)
    ),
    parent=Parent("step-00001000", "ab" * 32),
)


def _file(path: str, size: int) -> StoredFile:
    return StoredFile(path, size, f"{size:064x}")


EXPORTED: dict[str, Any] = {
    "step": 1200,
    "source": "/runs/a/step-00001200",
    "tables": (
        StoredTable("user", 100, 64, QuantType.INT8, 3, 640, _file("tables/0000-user.arrow", 8000)),
        StoredTable("größe", 7, 16, QuantType.FP32, 0, 64, _file("tables/0001-x.arrow", 600)),
    ),
    "collections": (
        StoredCollection("ebc", "bags", True, False, (("user", ("user", "seen"), "SUM"),)),
        StoredCollection("ec", "sequences", False, True, (("größe", ("size",), "NONE"),)),
    ),
    "parity": {"rows": 100, "worst": 1.5e-7, "tasks": {"": 0.0}},
    "dense": _file("dense.safetensors", 4321),
}
ARTIFACT = ArtifactManifest(
    **EXPORTED,
    outputs=(("click", "binary"), ("stars", "multiclass")),
    program=_file("dense.pt2", 999),
    no_program="",
    compiled=StoredCode(
        _file("compiled.pt2", 1001), Target(torch="2.13.0+cpu", processor=("avx2", "fma"))
    ),
    schema=_file("schema.json", 77),
    recipe={"model": "dlrm", "schema": "{}", "dense_layers": [64], "init_bound": None},
).sealed()
BARE_ARTIFACT = ArtifactManifest(
    **EXPORTED,
    outputs=(("", "regression"),),
    program=None,
    no_program="the model is of your code",
    compiled=None,
    schema=None,
    recipe=None,
).sealed()
LINK: dict[str, Any] = {"run": "9f", "artifact": "cd" * 32, "time": 1760000000.25}
BASE = Publication(
    **LINK, kind="base", seq=1, parent="", from_step=0, to_step=1200, dense=None
).sealed()
DELTA = Publication(
    **LINK,
    kind="delta",
    seq=2,
    parent=BASE.sha256,
    from_step=1200,
    to_step=1300,
    tables=(
        ChangedTable("user", 3, 5, (_file("tables/0000-user-0.arrow", 70),)),
        ChangedTable("größe", 0, 7, (_file("a.arrow", 1), _file("b.arrow", 2))),
    ),
    dense=_file("dense.safetensors", 4321),
).sealed()
RUN = RunFile(
    model=ModelRecipe(model="dcn", schema="", dense_layers=(32, 16), init_bound=None),
    data=DataSection(train="/data/train", schema="/data/schema.json", where="day < 10"),
    scaling=ScalingConfig(num_workers=4, cpus_per_worker=0.5),
    run=RunConfig(
        global_batch_size=512,
        steps=40,
        name="a",
        storage_path="/runs",
        sparse_schedule=(WarmupStage(WarmupPolicy.LINEAR, 10), WarmupStage(WarmupPolicy.POLY, 40)),
        sparse_optimizer=Adam(lr=0.02, weight_decay=0.1),
        checkpoint=CheckpointConfig(every_n_steps=10),
        extras={"who": "me", "at": [1, {"b": 2.5}]},
    ),
    plan=PlanSection(constraints={"t_cat_0": {"kinds": ["row_wise"]}}),
    source="",
)
