"""Erasure in random worlds: chains of checkpoints under any plan, and chains of publications.

Tables of these worlds say no seed, so the rows of keys become zeros.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from rayrec.checkpoint import CheckpointManager, Gather, ShardState, load_table, save_checkpoint
from rayrec.erasure.forget import forget
from rayrec.errors import ConfigError
from rayrec.layout import (
    DynamicConfig,
    EmbeddingBagConfig,
    ShardingPlan,
    TableLayout,
    TablePlacement,
)
from rayrec.next_item_recipe import NextItemModel
from rayrec.quant import pack_rows
from rayrec.serve import Predictor, export, open_artifact
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.version_policy import Verdict
from rayrec.serve.signing import SigningKey
from tests.unit.chain_worlds import save_chain
from tests.unit.checkpoint_worlds import Ranks, Truth, random_plan, random_truths
from tests.unit.next_item_worlds import ITEMS, LONGEST, next_item_world
from tests.unit.published_worlds import BOUNDS, bytes_of, published_world
from tests.unit.serve_worlds import a_model, a_schema, a_world, rows


def write_keys(path: Path, keys: dict[str, list[int]]) -> Path:
    longest = max(map(len, keys.values()))
    filled = {name: own + [None] * (longest - len(own)) for name, own in keys.items()}
    columns = {name: pa.array(own, pa.int64()) for name, own in filled.items()}
    pq.write_table(pa.table(columns), path)
    return path


def saved_values(path: str, name: str) -> dict[str, Tensor]:
    table, values = load_table(path, name).combine_chunks(), {}
    for column in table.column_names:
        if column != "row":
            chunk = table[column].chunk(0)
            flat = chunk if pa.types.is_floating(chunk.type) else chunk.flatten()
            values[column] = torch.tensor(flat.to_numpy()).float().view(len(table), -1)
    return values


def wanted_values(truth: Truth, gone: list[int], before: dict[str, Tensor]) -> dict[str, Tensor]:
    assert torch.equal(before["weight"], truth.weight.float().view_as(before["weight"]))
    for values in before.values():
        values[gone] = 0
    return before


@pytest.mark.seeds(range(100))
def test_chains_of_checkpoints_lose_the_rows_of_keys_and_no_others(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    truths, manager = random_truths(rng), CheckpointManager(str(tmp_path / "run"))
    length = rng.randint(1, 5)
    plan = random_plan(rng, truths, rng.randint(1, 3))
    bound = rng.choice([100, 1000, 1 << 20])
    full_every = rng.choice([0, 2, 3])
    history = save_chain(rng, manager, truths, plan, length, full_every, batch_bytes=bound)
    named = [t.config for t in truths if t is truths[0] or rng.random() < 0.5]
    keys = {
        c.name: rng.sample(range(c.num_embeddings), rng.randint(1, c.num_embeddings)) for c in named
    }
    paths = [manager.path(step) for step in range(1, length + 1)]
    before = [{t.config.name: saved_values(p, t.config.name) for t in truths} for p in paths]
    if length > 1 and rng.random() < 0.3:
        aside = manager.set_aside(rng.randint(1, length - 1))
        paths = [p if Path(p).exists() else f"{aside}/{Path(p).name}" for p in paths]
    forget(tmp_path / "run", write_keys(tmp_path / "keys.parquet", keys))
    for path, now, old in zip(paths, history, before, strict=True):
        for truth in now:
            name = truth.config.name
            wanted = wanted_values(truth, keys.get(name, []), old[name])
            for column, values in saved_values(path, name).items():
                assert torch.equal(values, wanted[column]), (path, name, column)
    receipt, _ = forget(tmp_path / "run", tmp_path / "keys.parquet")
    assert receipt.files == () and sum(table.found for table in receipt.tables) == 0


def dynamic_states(plan: ShardingPlan, rank: int) -> list[ShardState]:
    """Shards of a dynamic table of 40 rows, every third of them free, with candidates in two lanes
    and times.
    """
    number = torch.Generator().manual_seed(7)
    weight = torch.randn(40, 8, generator=number)
    keys = torch.arange(40) * 10**12 + 17
    keys[::3] = -1
    waiting = torch.arange(40) * 10**12 + 18
    waiting[1::2] = -1
    others = torch.where(waiting == -1, -1, waiting + 1)
    states = []
    for shard in plan.shards(rank):
        here, cols = slice(shard.rows.start, shard.rows.stop), list(shard.cols)
        ids = {}
        for kind, key in (("id", keys), ("candidate", waiting), ("candidate_1", others)):
            told = (key[here] % 97 + 1) * (key[here] != -1)
            ids[f"{kind}_key"] = key[here].clone()
            ids |= {f"{kind}_{column}": told.int() for column in ("seen", "hits")}
            ids[f"{kind}_time"] = told + 5 * (key[here] != -1)
        states.append(
            ShardState(shard, weight[here][:, cols].clone(), {"momentum1": key[here].float()}, ids)
        )
    return states


@pytest.mark.parametrize(
    "cuts", [((0, 40), (0, 4, 8)), ((0, 20, 40), (0, 8)), ((0, 20, 40), (0, 4, 8))]
)
def test_dynamic_tables_under_any_cuts_lose_ids_candidates_and_times(
    cuts: tuple[tuple[int, ...], tuple[int, ...]], tmp_path: Path
) -> None:
    rows_at, cols_at = cuts
    owners = [[(r + c) % 2 for c in range(len(cols_at) - 1)] for r in range(len(rows_at) - 1)]
    layout = TablePlacement(TableLayout(rows_at, cols_at, tuple(map(tuple, owners))))
    plan = ShardingPlan(world_size=2, tables={"t": layout})
    rule = DynamicConfig(blocks=2, admission_threshold=2, counter_capacity=80, ttl_s=60)
    table = EmbeddingBagConfig(40, 8, name="t", feature_names=["f"], dynamic=rule)
    path = str(tmp_path / "run" / "step-00000001")

    def body(rank: int, gather: Gather) -> None:
        save_checkpoint(
            path,
            shards=dynamic_states(plan, rank),
            tables=[table],
            plan=plan,
            rank=rank,
            world_size=2,
            gather=gather,
            dense={},
            step=1,
            batch_bytes=300,
        )

    Ranks(2).run(body).all()
    before = load_table(path, "t").combine_chunks()
    ids, waiting = [k * 10**12 + 17 for k in (1, 7, 38, 39)], [k * 10**12 + 18 for k in (2, 38, 5)]
    others = [k * 10**12 + 19 for k in (4, 20)]
    keys = write_keys(tmp_path / "keys.parquet", {"t": [*ids, *waiting, *others]})
    (told,) = forget(tmp_path / "run", keys)[0].tables
    # of the ids, 39 is free, and of the candidates 5
    assert (told.ids, told.found, told.found_now) == (9, 7, 0)
    after = load_table(path, "t").combine_chunks()
    for name in before.column_names:
        old, new = (one[name].to_pylist() for one in (before, after))
        gone = {1, 7, 38} if not name.startswith("candidate_") else {2, 38}
        gone = {4, 20} if name.startswith("candidate_1") else gone
        free = -1 if name.endswith("_key") else [0.0] * 8 if name == "weight" else 0
        assert new == [
            free if row in gone and name != "row" else was for row, was in enumerate(old)
        ]


def erased(predictor: Predictor, keys: dict[str, list[int]]) -> dict[str, bytes]:
    """The packed rows of a predictor by table, those of keys as zeros."""
    found = {}
    for collection in predictor.collections.values():
        for number, table in enumerate(collection.packed.tables):
            packed = collection.packed.rows_of(number).clone()
            zero = pack_rows(torch.zeros(1, table.width), table.kind, table.power)
            packed[keys.get(table.name, [])] = zero
            found[table.name] = packed.numpy().tobytes() + f" power {table.power}".encode()
    return found


@pytest.mark.seeds(range(40))
def test_chains_of_publications_go_on_without_the_rows_of_keys(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    world = published_world(tmp_path / "chain", seed, ranks=rng.randint(1, 2))
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    key = str(secret) if rng.random() < 0.4 else None
    world.start_ranks(world.plan, SigningKey.read(key))
    following = None
    for _ in range(rng.randint(1, 5)):
        world.train(rng, scale=rng.choice([1.0, 1e-6]))
        world.publish()
        if following is None or rng.random() < 0.5:
            following = following or Predictor.follow(tmp_path / "chain", signing_key=key)
            following.refresh()
    newest = Predictor.follow(tmp_path / "chain", signing_key=key)
    keys = {"item": rng.sample(range(60), rng.randint(1, 5))}
    wanted = erased(newest, keys)
    if key is not None:
        with pytest.raises(ConfigError, match=r"is signed; name the key with --signing-key"):
            forget(tmp_path / "chain", write_keys(tmp_path / "keys.parquet", keys))
    write_keys(tmp_path / "keys.parquet", keys)
    forget(tmp_path / "chain", tmp_path / "keys.parquet", signing_key=key)
    assert len(ChainFolder(tmp_path / "chain").places()) == 1
    assert following.refresh() == 1 and following.verdict is Verdict.CURRENT
    anew = Predictor.follow(tmp_path / "chain", signing_key=key)
    assert bytes_of(following) == bytes_of(anew) == wanted
    asked = rows(20, seed).to_pylist()
    assert torch.equal(following.predict(asked), anew.predict(asked))
    world.train(rng)
    world.start_ranks(world.plan, SigningKey.read(key))
    world.publish()
    assert following.refresh() == 1 and following.step == world.step


def test_a_model_of_ones_own_code_goes_on_by_its_program(tmp_path: Path) -> None:
    rng = random.Random(1)
    world = published_world(tmp_path / "chain", 1, ranks=1)
    world.extras, world.types = {}, dict.fromkeys(world.types, "fp32")
    world.start_ranks(world.plan)

    def own(checkpoint: str, out: Path):  # type: ignore[no-untyped-def]
        return export(
            checkpoint,
            out,
            types=world.types,
            bounds=BOUNDS,
            sample_rows=16,
            model=lambda: a_model(a_schema()),
            schema=a_schema(),
        )

    world.export = own  # type: ignore[method-assign]
    world.publish()
    for _ in range(2):
        world.train(rng)
        world.publish()
    kinds = [place.kind for place in ChainFolder(tmp_path / "chain").places()]
    assert kinds == ["base", "delta", "delta"]
    following = Predictor.follow(tmp_path / "chain")
    forget(tmp_path / "chain", write_keys(tmp_path / "keys.parquet", {"item": [3]}))
    assert following.refresh() == 1
    asked = rows(20, 1).to_pylist()
    anew = Predictor.follow(tmp_path / "chain")
    assert torch.allclose(following.predict(asked), anew.predict(asked))
    shutil.copytree(tmp_path / "chain" / "base-00000004", tmp_path / "alone")
    assert torch.allclose(Predictor.load(tmp_path / "alone").predict(asked), anew.predict(asked))


def test_a_signed_artifact_is_signed_again(tmp_path: Path) -> None:
    world, key = a_world(tmp_path), tmp_path / "secret"
    key.write_text("s" * 40)
    export(world.checkpoint, tmp_path / "served" / "a", signing_key=str(key))
    keys = write_keys(tmp_path / "keys.parquet", {"item": [3], "words": [4]})
    with pytest.raises(ConfigError, match=r"is signed; name the key with --signing-key"):
        forget(tmp_path / "served", keys)
    forget(tmp_path / "served", keys, signing_key=str(key))
    artifact = open_artifact(tmp_path / "served" / "a", signing_key=str(key))
    names = [table.name for table in artifact.packed.tables]
    rows_of = [artifact.packed.found(names.index(n), torch.arange(30)) for n in ("item", "words")]
    item, words = ((own == 0).all(1).nonzero().flatten().tolist() for own in rows_of)
    # a word is known by its bucket alone
    assert item == [3] and len(words) == 1


def test_an_item_of_a_next_item_model_is_forgotten(tmp_path: Path) -> None:
    model = NextItemModel(model="sasrec", layers=1, heads=1, length=LONGEST, loss="full")
    world = next_item_world(tmp_path / "run", 0, model)
    export(world.checkpoint, tmp_path / "run" / "served", types="fp32", bounds=BOUNDS)
    forget(tmp_path / "run", write_keys(tmp_path / "keys.parquet", {"item": [3, 9]}))
    song = open_artifact(tmp_path / "run" / "served").packed.found(0, torch.arange(ITEMS))
    saved = saved_values(world.checkpoint, "song")["weight"]
    wanted = world.table.clone()
    wanted[[3, 9]] = 0
    assert torch.equal(song, wanted) and torch.equal(saved, wanted)
    asked = [{"history": [1, 2], "at": [1, 2], "item": 5}]
    assert Predictor.load(tmp_path / "run" / "served").predict(asked).shape == (1,)
