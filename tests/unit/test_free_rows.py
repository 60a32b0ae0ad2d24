"""Checkpoints of dynamic tables hold the rows that are in use, and restore the table that was."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rayrec.checkpoint import (
    CheckpointManager,
    Manifest,
    Parent,
    ShardState,
    TableReader,
    copy_touched,
    load_table,
    read_manifest,
    restore_checkpoint,
    save_checkpoint,
)
from rayrec.dynamic.columns import lanes_of
from rayrec.dynamic.key_blocks import blocks_of
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.layout import (
    DataType,
    DynamicConfig,
    EmbeddingBagConfig,
    Shard,
    ShardingPlan,
    TablePlacement,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from tests.unit.checkpoint_worlds import Ranks
from tests.worlds import plan_for

WIDTH = 8
Whole = dict[str, Tensor]  # columns of a table


def random_table(rng: random.Random) -> EmbeddingBagConfig:
    blocks = rng.choice([1, 2, 4])
    kind, rows = rng.choice([DataType.FP32, DataType.BF16]), blocks * rng.randint(1, 9)
    counting: dict[str, int] = rng.choice([{}, {"admission_threshold": 2}])
    if counting and rng.random() < 0.5:
        counting |= {"counter_capacity": 2 * rows}
    rule = DynamicConfig(blocks=blocks, **counting)
    return EmbeddingBagConfig(rows, WIDTH, "t", kind, feature_names=["f"], dynamic=rule)


def random_ids(rng: random.Random, table: EmbeddingBagConfig, kind: str, share: float) -> Whole:
    rows, size = table.num_embeddings, table.row_multiple
    keys = [-1] * rows
    for _ in range(3 * rows):
        one = rng.randrange(-(2**63), 2**63)
        first = int(blocks_of(np.array([one]), rows // size)[0]) * size
        at = first + rng.randrange(size)
        if one != -1 and keys[at] == -1 and rng.random() < share:
            keys[at] = one
    key = torch.tensor(keys)
    counts = (torch.randint(1, 50, (rows,), dtype=torch.int32) * (key != -1) for _ in range(2))
    return dict(zip((f"{kind}_key", f"{kind}_seen", f"{kind}_hits"), (key, *counts), strict=True))


def random_whole(rng: random.Random, table: EmbeddingBagConfig) -> Whole:
    """A table, in whose free rows lies what was there before."""
    torch.manual_seed(rng.randrange(1 << 30))
    rows = table.num_embeddings
    dtype = torch.bfloat16 if table.data_type is DataType.BF16 else torch.float32
    whole = {"weight": torch.randn(rows, WIDTH).to(dtype)}
    whole |= random_ids(rng, table, "id", rng.choice([0.0, 0.05, 0.5, 1.0]))
    if table.dynamic is not None and table.dynamic.admission_threshold > 1:
        lanes = ["candidate"] + ["candidate_1"] * (table.dynamic.counter_capacity is not None)
        for lane in lanes:
            whole |= random_ids(rng, table, lane, rng.choice([0.0, 0.3, 1.0]))
    return {**whole, "sums": torch.rand(rows), "squares": torch.rand(rows, WIDTH)}


def random_plan(rng: random.Random, table: EmbeddingBagConfig) -> ShardingPlan:
    ranks = rng.randint(1, 3)
    every = list(range(ranks))
    layouts = [table_wise(table, rng.choice(every)), row_wise(table, every)]
    layouts += [column_wise(table, every), grid_shard(table, [every]), data_parallel(table, every)]
    return plan_for(ranks, {"t": rng.choice(layouts)})


def states_of(whole: Whole, plan: ShardingPlan, rank: int) -> list[ShardState]:
    return [state_of(whole, shard) for shard in plan.shards(rank)]


def state_of(whole: Whole, shard: Shard) -> ShardState:
    rows, cols = (slice(part.start, part.stop) for part in (shard.rows, shard.cols))
    own = {
        name: (column[rows, cols] if column.dim() == 2 else column[rows]).clone()
        for name, column in whole.items()
    }
    weight, optimizer = own.pop("weight"), {name: own.pop(name) for name in ("sums", "squares")}
    return ShardState(shard, weight, optimizer, own)


def save(
    path: str,
    table: EmbeddingBagConfig,
    plan: ShardingPlan,
    whole: Whole,
    rows: list[int] | None = None,
    **options: Any,
) -> Manifest:
    """Save a table, or some rows of it."""

    def body(rank: int, gather: Any) -> Manifest:
        shards: list[Any] = states_of(whole, plan, rank)
        if rows is not None:
            own = [[row for row in rows if row in state.shard.rows] for state in shards]
            pairs = zip(shards, own, strict=True)
            shards = [copy_touched(s, torch.tensor(r, dtype=torch.int64)) for s, r in pairs]
        world = {"plan": plan, "rank": rank, "world_size": plan.world_size, "gather": gather}
        given = {"step": 1, "dense": {}, "tables": [table], **world, **options}
        return save_checkpoint(path, shards=shards, **given)

    return Ranks(plan.world_size).run(body).all()[0]


def without_free(whole: Whole) -> Whole:
    """The table with zeros as the values of rows that belong to no id."""
    free = whole["id_key"] == -1
    blank = {name: column.clone() for name, column in whole.items()}
    for name in ("weight", "sums", "squares"):
        blank[name][free] = 0
    return blank


def check_restored(path: str, table: EmbeddingBagConfig, plan: ShardingPlan, whole: Whole) -> None:
    """Every rank of a plan gets the table, whatever lay in its memory."""
    rubbish = {name: torch.full_like(column, 7) for name, column in whole.items()}
    for rank in range(plan.world_size):
        states = states_of(rubbish, plan, rank)
        restore_checkpoint(path, states, tables=[table])
        for state in states:
            wanted = state_of(without_free(whole), state.shard)
            for name, column in wanted.tensors().items():
                # row-wise state of column blocks that merge is a mean of float64 of equal values
                assert torch.equal(state.tensors()[name], column), name


def plain(table: pa.Table) -> dict[str, list[Any]]:
    return {name: table.column(name).to_pylist() for name in table.column_names}


@pytest.mark.seeds(range(80))
def test_any_plan_restores_what_is_in_use(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    table = random_table(rng)
    whole, plan = random_whole(rng, table), random_plan(rng, table)
    options = {"batch_bytes": rng.choice([1, 200, 700, 1 << 20])}
    manager = CheckpointManager(str(tmp_path))
    manifest = save(manager.path(1), table, plan, whole, **options)
    in_use = whole["id_key"] != -1
    for lane in lanes_of("candidate", whole):
        in_use |= whole[f"{lane}_key"] != -1
    for entry in manifest.files:
        rows = in_use[entry.rows.start : entry.rows.stop]
        assert entry.live is not None and sum(entry.live) == int(rows.sum())
    check_restored(manager.path(1), table, random_plan(rng, table), whole)
    # the same for any number of ranks
    other = random_plan(rng, table)
    save(manager.path(2), table, other, whole, **options)
    wanted = plain(load_table(manager.path(1), "t"))
    assert plain(load_table(manager.path(2), "t")) == wanted
    assert wanted["weight"] == without_free(whole)["weight"].float().tolist()
    assert wanted["id_key"] == whole["id_key"].tolist()
    reader = TableReader(manager.path(2), read_manifest(manager.path(2)))
    rows = range(table.num_embeddings // 3, table.num_embeddings)
    assert reader.read("t", rows).tolist() == wanted["weight"][rows.start :]
    # increments upon it: rows of new ids, of other ids and of none
    later, touched = (
        random_whole(rng, table),
        sorted(rng.sample(range(len(in_use)), len(in_use) // 2)),
    )
    now = {name: column.clone() for name, column in whole.items()}
    for name, column in now.items():
        column[touched] = later[name][touched]
    parent = Parent("step-00000001", manifest.sha256())
    save(manager.path(3), table, plan, now, touched, parent=parent, step=3, **options)
    check_restored(manager.path(3), table, random_plan(rng, table), now)
    save(manager.path(4), table, other, now)
    assert plain(load_table(manager.path(3), "t")) == plain(load_table(manager.path(4), "t"))


@pytest.fixture
def world(tmp_path: Path) -> tuple[str, EmbeddingBagConfig, ShardingPlan, Whole]:
    """A table of 64 rows, of which 6 have an id and 10 a candidate, saved in 8 parts."""
    rule = DynamicConfig(blocks=1, admission_threshold=2)
    table = EmbeddingBagConfig(64, WIDTH, "t", feature_names=["f"], dynamic=rule)
    torch.manual_seed(0)
    whole = {"weight": torch.randn(64, WIDTH)}
    for kind, places in (("id", range(3, 9)), ("candidate", range(20, 30))):
        key = torch.full((64,), -1)
        key[list(places)] = torch.arange(len(places)) + 1000
        whole |= {f"{kind}_key": key, f"{kind}_seen": (key != -1).int()}
        whole |= {f"{kind}_hits": 2 * (key != -1).int()}
    whole |= {"sums": torch.rand(64), "squares": torch.rand(64, WIDTH)}
    plan = plan_for(1, {"t": table_wise(table, 0)})
    path = CheckpointManager(str(tmp_path)).path(1)
    save(path, table, plan, whole, batch_bytes=8 * 108)
    return path, table, plan, whole


def test_files_are_as_pyarrow_reads_them(world: Any) -> None:
    path, _, _, whole = world
    (entry,) = read_manifest(path).files
    assert entry.batch_rows == 8 and entry.live == (5, 1, 4, 6, 0, 0, 0, 0)
    body = json.loads(Path(path, "manifest.json").read_text())
    assert body["version"] == 3 and body["files"][0]["live"] == list(entry.live)
    with pa.memory_map(f"{path}/{entry.path}") as source:
        rows = pa.ipc.open_file(source).read_all()
    assert rows.column_names[:2] == ["row", "weight"]
    assert rows["row"].to_pylist() == [*range(3, 9), *range(20, 30)]
    assert rows["weight"].to_pylist() == whole["weight"][3:9].tolist() + [[]] * 10
    assert rows["squares"].to_pylist()[6:] == [[]] * 10
    assert rows["sums"].to_pylist() == whole["sums"][3:9].tolist() + [0.0] * 10
    assert rows["candidate_key"].to_pylist() == [-1] * 6 + list(range(1000, 1010))


def test_a_table_that_is_almost_empty_takes_little(tmp_path: Path) -> None:
    rng, sizes = random.Random(0), []
    rule = DynamicConfig(blocks=1, admission_threshold=2)
    table = EmbeddingBagConfig(4000, WIDTH, "t", feature_names=["f"], dynamic=rule)
    plan = plan_for(1, {"t": table_wise(table, 0)})
    rest = {"weight": torch.rand(4000, WIDTH), "sums": torch.rand(4000)}
    rest["squares"] = torch.rand(4000, WIDTH)
    for number, share in enumerate((0.02, 1.0)):
        ids = random_ids(rng, table, "id", share) | random_ids(rng, table, "candidate", share)
        path = str(tmp_path / str(number))
        sizes.append(save(path, table, plan, {**rest, **ids}).files[0].num_bytes)
        check_restored(path, table, plan, {**rest, **ids})
    assert sizes[0] < 0.15 * sizes[1]


def test_checkpoints_with_all_rows_still_load(world: Any, tmp_path: Path) -> None:
    """Files were of all rows once, as are those of tables whose columns are all state."""
    _, table, plan, whole = world
    path = str(tmp_path / "old")
    states = [
        replace(state, optimizer={**state.ids, **state.optimizer}, ids={})
        for state in states_of(whole, plan, 0)
    ]
    given = {"step": 1, "dense": {}, "tables": [table], "plan": plan}
    save_checkpoint(
        path, shards=states, rank=0, world_size=1, gather=lambda value: [value], **given
    )
    assert json.loads(Path(path, "manifest.json").read_text())["version"] == 1
    (entry,) = read_manifest(path).files
    assert entry.live is None and [c.name for c in entry.columns][:2] == ["weight", "id_key"]
    (state,) = states_of({name: torch.zeros_like(c) for name, c in whole.items()}, plan, 0)
    restore_checkpoint(path, [state], tables=[table])
    for name, column in state.tensors().items():
        assert torch.equal(column, whole[name])
    bigger = replace(table, num_embeddings=128)
    larger = {name: torch.zeros(128, *c.shape[1:], dtype=c.dtype) for name, c in whole.items()}
    tables = {"t": TablePlacement(table_wise(bigger, 0))}
    (state,) = states_of(larger, ShardingPlan(world_size=1, tables=tables), 0)
    assert restore_checkpoint(path, [state], tables=[bigger]).left_out == {"t": 0}
    assert torch.equal(state.weight[:6], whole["weight"][3:9])


@pytest.mark.parametrize(
    "live",
    [(5, 1, 4, 6, 0, 0, 0), (5, 1, 4, 6, 0, 0, 0, 0, 0), (5, 1, 4, 9, 0, 0, 0, 0)],
    ids=["too few", "too many", "more than there are"],
)
def test_counts_of_other_rows_are_refused(world: Any, live: tuple[int, ...]) -> None:
    path = world[0]
    manifest = read_manifest(path)
    (entry,) = manifest.files
    no_ids = tuple(column for column in entry.columns if column.name != "id_key")
    for other in (replace(entry, live=live), replace(entry, columns=no_ids)):
        Path(path, "manifest.json").write_bytes(replace(manifest, files=(other,)).to_bytes())
        with pytest.raises(CheckpointError, match=r"counts other rows of tables/t/r0-64-c0-8\."):
            read_manifest(path)


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("row", 0, 8),  # not in the first part
        ("row", 1, 3),  # twice
        ("id_key", 0, -1),  # more lists than ids
    ],
)
def test_rows_that_are_others_are_damage(world: Any, name: str, at: int, value: int) -> None:
    """Without the checksums, as `verify=False` reads."""
    path, table, plan, whole = world
    (entry,) = read_manifest(path).files
    data = bytearray(Path(path, entry.path).read_bytes())
    old = {"row": torch.arange(3, 8), "id_key": torch.arange(5) + 1000}[name]
    new = old.clone()
    new[at] = value
    place = data.index(old.numpy().tobytes())
    data[place : place + 40] = new.numpy().tobytes()
    Path(path, entry.path).write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="other rows in batch 0"):
        restore_checkpoint(path, states_of(whole, plan, 0), tables=[table], verify=False)


def test_any_damaged_byte_is_told_without_checksums(world: Any) -> None:
    path, table, plan, whole = world
    (entry,) = read_manifest(path).files
    sound = Path(path, entry.path).read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(entry.marks[-2].end)] = rng.randrange(256)
        Path(path, entry.path).unlink()  # a thread may still read what was mapped
        Path(path, entry.path).write_bytes(data)
        try:
            restore_checkpoint(path, states_of(whole, plan, 0), tables=[table], verify=False)
        except CheckpointError as error:
            assert "batch" in str(error)
