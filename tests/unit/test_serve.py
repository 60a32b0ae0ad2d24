"""Artifacts hold what checkpoints do, and predictors score as the trained model did."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from rayrec.checkpoint import TableReader, load_table, read_manifest
from rayrec.data import DenseColumn, Feature, FeatureSchema, to_batch
from rayrec.errors import ArtifactError, CheckpointError, ConfigError, InputError
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from rayrec.quant import QuantType, tables, unpack_rows
from rayrec.serve import ParityBounds, Predictor, export, open_artifact
from rayrec.serve.readers import RowReader, UserOnce
from rayrec.sparse import KeyedJaggedTensor
from rayrec.spec.task import Task
from tests.unit.checkpoint_worlds import make_truth, random_plan, save_world
from tests.unit.serve_worlds import WIDTH, World, a_model, a_schema, a_world, rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return a_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("served") / "fp32"
    export(world.checkpoint, out, types="fp32", data=world.data)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_read_from_any_rectangles(seed, tmp_path):
    world = a_world(tmp_path, seed, ranks=1 + seed % 4)
    reader = TableReader(world.checkpoint, read_manifest(world.checkpoint))
    for table in world.schema.tables:
        wanted = load_table(world.checkpoint, table.name)["weight"].combine_chunks().flatten()
        wanted = torch.tensor(wanted.to_numpy()).view(-1, WIDTH)
        cuts = sorted({0, seed % 17, 20 + seed, table.num_embeddings})
        cuts = [cut for cut in cuts if cut <= table.num_embeddings]
        parts = [reader.read(table.name, range(a, b)) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), wanted)


@pytest.mark.parametrize("seed", range(6))
def test_an_artifact_scores_as_its_checkpoint(seed, tmp_path):
    """From any ranks and plan, with and without weights, of float32 rows bit for bit."""
    world = a_world(tmp_path, seed, ranks=1 + seed % 4, weighted=seed % 2 == 1)
    export(world.checkpoint, tmp_path / "out", types="fp32", data=world.data)
    predictor = Predictor.load(tmp_path / "out")
    table = rows(50, 77, weighted=seed % 2 == 1)
    wanted = world.logits(table)
    torch.testing.assert_close(predictor.logits(table), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(predictor.predict(table), wanted.sigmoid(), rtol=1e-5, atol=1e-6)
    assert predictor.step == 7 and predictor.schema == world.schema


@pytest.mark.parametrize("kind", list(QuantType))
def test_tables_are_read_by_pyarrow_alone(world, kind, tmp_path):
    out = tmp_path / "out"
    manifest = export(
        world.checkpoint, out, types={"item": kind, "*": "int8"}, bounds=ParityBounds(logit=9)
    )
    for table in manifest.tables:
        with pa.memory_map(str(out / table.file.path)) as source:
            batches = pa.ipc.open_file(source)
            assert batches.num_record_batches == 1
            batch = batches.get_batch(0)
            said = {key.decode(): value.decode() for key, value in batches.schema.metadata.items()}
            data = np.frombuffer(batch.column(0).buffers()[1], np.uint8)
        packed = table.packed
        assert said["rayrec.table"] == packed.name and said["rayrec.type"] == packed.kind.name
        own = torch.from_numpy(data[: packed.num_bytes].copy()).view(packed.rows, -1)
        values = unpack_rows(own, packed.kind, int(said["rayrec.width"]), int(said["rayrec.power"]))
        wanted = world.module.get_submodule(
            f"model.sparse_arch.embedding_bag_collection.embedding_bags.{packed.name}"
        ).weight
        spread = (wanted.amax(1) - wanted.amin(1)).unsqueeze(1)
        steps = {"FP32": 1e9, "FP16": 2**11, "INT8": 255, "INT4": 15}[packed.kind.name]
        assert ((values - wanted).abs() <= 1.05 * spread / steps + 1e-9).all()


def test_plain_rows_arrow_and_tensors_give_the_same_scores(world, served):
    predictor = Predictor.load(served)
    table = rows(20, 5).drop_columns(["click"])
    wanted = predictor.predict(table)
    assert torch.equal(predictor.predict(table.to_pylist()), wanted)
    batches = table.to_batches(max_chunksize=7)
    assert torch.equal(torch.cat([predictor.predict(batch) for batch in batches]), wanted)
    batch = to_batch(table, world.schema, with_labels=False)
    assert torch.equal(predictor.predict(batch.sparse_features, batch.dense_features), wanted)
    assert predictor.predict([]).shape == predictor.predict(table[:0]).shape == (0,)


USER = ("user", "seen", "age")


def test_a_reader_is_gone_once_nobody_has_it():
    table = rows(3, 8).drop_columns(["click"])
    gc.disable()
    try:
        reader = RowReader(a_schema(), is_checked=False, once=UserOnce())
        request = reader.of_user(table.select(USER).slice(0, 1), table.drop_columns(USER))
        assert len(request.dense) == 3
        alive = weakref.ref(reader)
        del reader
        assert alive() is None
    finally:
        gc.enable()


def test_the_row_of_a_user_may_have_views_of_text():
    """It is repeated, where the model takes no keys of different numbers of bags."""
    table = rows(4, 8).drop_columns(["click"])
    views = table.set_column(2, "user", table["user"].cast(pa.string_view()))
    reader = RowReader(a_schema(), is_checked=False, once=None)
    asked = [
        reader.of_user(one.select(USER).slice(0, 1), table.drop_columns(USER)).ids.values()
        for one in (table, views)
    ]
    assert torch.equal(*asked)


@pytest.mark.parametrize("weighted", [False, True])
def test_one_user_with_many_candidates(weighted, tmp_path):
    world = a_world(tmp_path, 3, weighted=weighted)
    export(world.checkpoint, tmp_path / "out", types="int8", data=world.data)
    predictor = Predictor.load(tmp_path / "out")
    own = [*USER, "seen_w"] if weighted else list(USER)
    table = rows(30, 8, weighted).drop_columns(["click"])
    user = table.select(own).to_pylist()[4]
    candidates = table.drop_columns(own)
    whole = [{**user, **one} for one in candidates.to_pylist()]
    wanted = predictor.predict(whole)
    for given in (candidates, candidates.to_pylist(), candidates.to_batches()[0]):
        got = predictor.predict_candidates(user, given)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    # all features on one side: the user's columns are repeated
    only_age = predictor.predict_candidates(
        {"age": user["age"]}, table.drop_columns(["age"]).to_pylist()
    )
    assert only_age.shape == (30,)
    assert predictor.predict_candidates(user, []).shape == (0,)
    with pytest.raises(InputError, match="column 'age' is in the user's row and in the cand"):
        predictor.predict_candidates(user, table.drop_columns(["user"]))
    with pytest.raises(InputError, match="the user has 2 rows"):
        predictor.predict_candidates([user, user], candidates)
    if weighted:
        del user["seen_w"]
        with pytest.raises(ConfigError, match="'seen' has its ids in column 'seen' and weights"):
            predictor.predict_candidates(user, table.drop_columns(list(USER)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"item": 60}, r"feature 'item' \(column 'item'\) holds id 60 in row 1 of the request"),
        ({"item": "x"}, "column 'item' of the request holds values of several types"),
        ({"item": 10**30}, "column 'item' of the request holds a number beyond 64 bits"),
        ({"price": float("nan")}, "dense column 'price' holds nan in row 1 of the request"),
        ({"user": 1.5}, "column 'user' of the request holds values of several types"),
        ({"seen": [3, None]}, "column 'seen' has a null inside the list in row 1"),
        ({"words": 7}, "column 'words' of the request holds values of several types"),
    ],
)
def test_a_bad_value_is_named(served, change, says):
    predictor = Predictor.load(served)
    good = rows(3, 5).drop_columns(["click"]).to_pylist()
    good[1] |= change
    with pytest.raises(InputError, match=says):
        predictor.predict(good)
    del good[1][next(iter(change))]
    with pytest.raises(InputError, match=f"row 1 of the request has no '{next(iter(change))}'"):
        predictor.predict(good)


def test_what_is_no_row_is_named(served):
    predictor = Predictor.load(served)
    table = rows(3, 5)
    with pytest.raises(InputError, match="column 'item' is missing"):
        predictor.predict(table.drop_columns(["item"]))
    with pytest.raises(InputError, match="the request is of int"):
        predictor.predict(7)
    with pytest.raises(InputError, match="row 0 of the request is of str"):
        predictor.predict(["a"])
    with pytest.raises(InputError, match="dense belongs to a KeyedJaggedTensor"):
        predictor.predict(table, torch.zeros(3, 2))
    ids = KeyedJaggedTensor(
        ["user", "item", "seen", "words"], torch.arange(4), lengths=torch.ones(4).int()
    )
    for dense in (None, torch.zeros(1, 3), torch.zeros(2, 2), torch.zeros(1, 2).int()):
        with pytest.raises(InputError, match=r"give \(1, 2\) float32"):
            predictor.predict(ids, dense)
    with pytest.raises(InputError, match="dense column 1 holds nan in row 0"):
        predictor.predict(ids, torch.tensor([[0.0, torch.nan]]))
    far = KeyedJaggedTensor(
        ["user", "item", "seen", "words"], torch.tensor([1, 99, 1, 1]), lengths=torch.ones(4).int()
    )
    with pytest.raises(InputError, match="id 99 of key 'item', row 0 in the lookup of table"):
        predictor.predict(far, torch.zeros(1, 2))


def test_a_model_of_the_users_code_is_served_by_its_program(tmp_path):
    world = a_world(tmp_path, 4, with_recipe=False)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="does not say how to build its model"):
        export(world.checkpoint, out)
    model = lambda: a_model(world.schema, "meta")  # noqa: E731
    manifest = export(world.checkpoint, out, types="fp32", model=model, schema=world.schema)
    assert manifest.recipe is None and manifest.program is not None and not manifest.no_program
    table = rows(40, 9)
    wanted = world.logits(table)
    program = Predictor.load(out)
    assert program.weights.scorer is None
    for part in (table, table[:1], table[:0]):
        torch.testing.assert_close(program.logits(part), wanted[: len(part)], rtol=1e-4, atol=1e-5)
    by_code = Predictor.load(out, model=model)
    torch.testing.assert_close(by_code.logits(table), wanted, rtol=1e-5, atol=1e-5)
    user = rows(1, 3).select(list(USER)).to_pylist()[0]
    others = table.drop_columns(["click", *USER])
    torch.testing.assert_close(
        program.predict_candidates(user, others), by_code.predict_candidates(user, others)
    )
    with pytest.raises(ArtifactError, match="was exported with"):
        Predictor.load(out, model=lambda: torch.nn.Linear(2, 2))


def test_parity_is_measured_and_bounded(world, tmp_path):
    out = tmp_path / "out"
    manifest = export(world.checkpoint, out, types="int8", data=world.data, sample_rows=300)
    told = manifest.parity
    assert told["rows"] == 300 and told["rows_of"].endswith("eval")
    assert 0 < told["mean_logit_error"] < told["max_logit_error"] < 0.2
    assert abs(told["auc_difference"]) < 0.01 and told["bounds"]["auc"] == 0.003
    predictor = Predictor.load(out)
    table = pa.table(rows(400))
    error = (predictor.logits(table) - world.logits(table)).abs().max()
    assert error < 2 * told["max_logit_error"] + 1e-6
    refused = tmp_path / "refused"
    with pytest.raises(ArtifactError) as caught:
        export(
            world.checkpoint,
            refused,
            types={"words": "int4", "*": "fp32"},
            bounds=ParityBounds(logit=0.001),
        )
    assert "in logit on 8192 of random rows, and at most 0.001 is allowed" in str(caught.value)
    assert "these alone move the logits most: 'words' (0." in str(caught.value)
    assert not refused.exists()
    # what an export leaves that was killed can be written over
    (refused / "tables").mkdir(parents=True)
    (refused / "dense.safetensors").write_text("half")
    export(world.checkpoint, refused, types="fp32")


def hashes(manifest):
    return [table.file.sha256 for table in manifest.tables]


def test_the_bytes_depend_on_neither_plan_nor_chunks(tmp_path, monkeypatch):
    """Two saves of one model from other ranks under other plans, in parts of a few rows."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    worlds = [a_world(folders[0], 5, ranks=1), a_world(folders[1], 5, ranks=4, plan_seed=77)]
    types = {"user": "int4", "item": "int8", "*": "fp16"}
    first = export(worlds[0].checkpoint, tmp_path / "a", types=types)
    monkeypatch.setattr(tables, "CHUNK_BYTES", 7 * 4 * WIDTH)
    second = export(worlds[1].checkpoint, tmp_path / "b", types=types)
    assert hashes(first) == hashes(second) and len(set(hashes(first))) == 3
    plans = [read_manifest(world.checkpoint).plan for world in worlds]
    assert plans[0] != plans[1]


class Sequences(nn.Module):
    """A training module of the user's: a mean over a sequence, and a bag beside it; two tasks."""

    def __init__(self):
        super().__init__()
        config = {"embedding_dim": WIDTH, "num_embeddings": 40}
        self.seen = EmbeddingCollection(
            [EmbeddingConfig(name="seen", feature_names=["seen"], **config)], device="meta"
        )
        self.item = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="item", feature_names=["item"], **config)], device="meta"
        )
        self.top = nn.Linear(2 * WIDTH + 1, 2)

    def forward(self, batch):
        bags = self.seen(batch.sparse_features)["seen"]
        mean = bags.to_padded_dense(4).sum(1)
        item = self.item(batch.sparse_features).values()
        out = self.top(torch.cat([mean, item, batch.dense_features], 1))
        logits = {"click": out[:, 0], "stay": out[:, 1]}
        loss = out.sum() * 0 + batch.labels.sum() * 0
        return loss, (loss, logits, {"click": batch.labels, "stay": batch.labels})


def test_a_model_with_sequences_and_tasks(tmp_path):
    torch.manual_seed(2)
    schema = FeatureSchema(
        label=("clicked", "stayed"),
        dense=(DenseColumn(column="age"),),
        features=(Feature(name="seen", column="seen"), Feature(name="item", column="item")),
        tables=tuple(
            EmbeddingBagConfig(40, WIDTH, name, feature_names=[name]) for name in ("seen", "item")
        ),
    )
    module = Sequences().eval()
    rng = random.Random(3)
    truths = [make_truth(rng, name, 40, WIDTH, "row") for name in ("seen", "item")]
    dense = {name: p.detach() for name, p in module.top.named_parameters(prefix="top")}
    save_world(str(tmp_path / "ck"), truths, random_plan(rng, truths, 2), dense=dense)
    tasks = (Task(name="click"), Task(name="stay", kind="regression"))
    given = {"model": Sequences, "schema": schema, "types": "fp32"}
    with pytest.raises(ConfigError, match="give tasks=, those of the run"):
        export(tmp_path / "ck", tmp_path / "out", **given)
    manifest = export(tmp_path / "ck", tmp_path / "out", tasks=tasks, **given)
    assert manifest.program is None and "sequences" in manifest.no_program
    with pytest.raises(ArtifactError, match=r"has no program .* load it with model="):
        Predictor.load(tmp_path / "out")
    predictor = Predictor.load(tmp_path / "out", model=Sequences)
    asked = [{"age": 0.5, "seen": [1, 2], "item": 3}, {"age": 1.0, "seen": [], "item": 39}]
    seen, item = (truth.weight for truth in truths)
    means = torch.stack([seen[1] + seen[2], torch.zeros(WIDTH)])
    inputs = torch.cat([means, item[[3, 39]], torch.tensor([[0.5], [1.0]])], 1)
    wanted = module.top(inputs).detach()
    scores = predictor.predict(asked)
    torch.testing.assert_close(scores["click"], wanted[:, 0].sigmoid())
    torch.testing.assert_close(scores["stay"], wanted[:, 1])
    # rows of a user are repeated, where sequences keep their lengths
    both = predictor.predict_candidates({"age": 0.5, "seen": [1, 2]}, [{"item": 3}, {"item": 39}])
    torch.testing.assert_close(both["stay"][0], scores["stay"][0])


def test_an_artifact_of_version_1_is_still_read():
    """The folder was written when the format was new; it must load for as long as it is read."""
    kept = Path(__file__).parent / "artifact_v1"
    told = json.loads((kept / "scores.json").read_text())
    predictor = Predictor.load(kept / "artifact")
    scores = predictor.predict(told["rows"])
    torch.testing.assert_close(scores, torch.tensor(told["scores"]), rtol=1e-5, atol=1e-6)
    kinds = {table.packed.kind for table in predictor.manifest.tables}
    assert kinds == {QuantType.INT8, QuantType.INT4, QuantType.FP16}


def test_rows_that_cannot_be_packed_are_refused_before_anything_is_written(tmp_path):
    world = a_world(tmp_path, 1, scale=1e5)
    with pytest.raises(InputError, match=r"of table 'user' holds .*; INT8 rows hold at"):
        export(world.checkpoint, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_what_is_wrong_with_an_export(world, served, tmp_path):
    with pytest.raises(ArtifactError, match="already holds a complete artifact"):
        export(world.checkpoint, served)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"holds 'notes.txt', which is no part of an artifact"):
        export(world.checkpoint, tmp_path)
    with pytest.raises(CheckpointError, match=r"has no file manifest.json"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no table 'users'"):
        export(world.checkpoint, tmp_path / "out", types={"users": "int8", "*": "int8"})
    with pytest.raises(ConfigError, match="on another file system"):
        export(world.checkpoint, "s3://bucket/out")
    with pytest.raises(ConfigError, match="the bound auc"):
        ParityBounds(auc=-1.0)
    other = a_schema(weighted=True)
    with pytest.raises(InputError, match="no weights"):
        export(
            world.checkpoint,
            tmp_path / "out",
            model=lambda: a_model(other),
            schema=a_schema(),
            data=world.data,
        )


def damaged(served: Path, folder: Path) -> Path:
    """A copy of an artifact."""
    copy = folder / "copy"
    subprocess.run(["cp", "-r", str(served), str(copy)], check=True)
    return copy


def test_damage_is_found_and_named(served, tmp_path):
    manifest = json.loads((served / "manifest.json").read_text())
    paths = [table["file"]["path"] for table in manifest["tables"]]
    for number, path in enumerate([*paths, "dense.safetensors", "dense.pt2", "schema.json"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        copy = damaged(served, folder)
        data = bytearray((copy / path).read_bytes())
        data[len(data) // 2] ^= 64
        (copy / path).write_bytes(data)
        with pytest.raises(ArtifactError, match=f"{path} is damaged"):
            open_artifact(copy)
        (copy / path).write_bytes(data[:-1])
        with pytest.raises(ArtifactError, match=f"{path} has .* it is truncated"):
            open_artifact(copy)
        (copy / path).unlink()
        with pytest.raises(ArtifactError, match=f"no file {path}"):
            open_artifact(copy)
        os.mkfifo(copy / path)
        with pytest.raises(ArtifactError, match=f"{path} is no plain file"):
            open_artifact(copy)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: text.replace('"step": 7', '"step": 8'), "is damaged: its sha256"),
        (lambda text: text.replace('"version": 2', '"version": 3'), "has artifact version 3"),
        (lambda text: text.replace("rayrec.artifact", "rayrec.checkpoint"), "is no rayrec.art"),
        (lambda text: "[]", "cannot be read"),
        (lambda text: "", "cannot be read"),
    ],
)
def test_a_manifest_that_is_not_what_was_written(served, tmp_path, change, says):
    copy = damaged(served, tmp_path)
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(change(text))
    with pytest.raises(ArtifactError, match=says):
        Predictor.load(copy)


def test_a_path_without_an_artifact(tmp_path, world):
    with pytest.raises(ArtifactError, match=r"has no file manifest.json: the path is wrong"):
        Predictor.load(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"says format='rayrec\.checkpoint'"):
        Predictor.load(world.checkpoint)


def test_serving_needs_neither_ray_nor_the_trainer(served):
    code = f"""
import sys, warnings
warnings.simplefilter("ignore")
from rayrec.serve import Predictor
import rayrec.quant
Predictor.load({str(served)!r})
loaded = [name for name in sys.modules if name.split(".")[0] == "ray"]
loaded += [name for name in sys.modules if name.startswith(("rayrec.distributed", "rayrec.train"))]
print(loaded)
import torch.distributed as dist
assert not dist.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
