"""A base and the deltas after it equal a fresh export of the last step, byte for byte, whatever
ranks and plan published them.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from rayrec.errors import SaveError
from rayrec.serve import Predictor
from rayrec.serve.chain import follower
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.follower import Follower
from rayrec.serve.chain.version_policy import Verdict
from tests.unit.checkpoint_worlds import random_plan
from tests.unit.published_worlds import assert_equal, published_world
from tests.unit.serve_worlds import rows

ROWS = rows(20).drop_columns(["click"]).to_pylist()


@pytest.mark.slow
@pytest.mark.seeds(range(30))
def test_a_chain_equals_a_fresh_export_for_any_ranks_plan_and_types(seed, tmp_path):
    rng = random.Random(seed)
    scale = 10.0 ** rng.randint(-7, 2)
    world = published_world(tmp_path / "chain", seed, scale)
    assert world.publish() == "base-00000001"
    strict, loose = (Predictor.follow(tmp_path / "chain", strict=one) for one in (True, False))
    for number in range(2, 6):
        world.train(rng, scale)
        if rng.random() < 0.2:
            world.start_ranks(random_plan(rng, world.truths, rng.randint(1, 3)))
        assert world.publish() in (f"base-{number:08d}", f"delta-{number:08d}")
        if rng.random() < 0.6:
            assert strict.refresh() + loose.refresh()
    world.train(rng, scale * 1e-3)  # smaller rows, by which all rows are packed otherwise
    world.publish()
    fresh = world.fresh(tmp_path / "fresh")
    late = Predictor.follow(tmp_path / "chain")
    for predictor in (strict, loose, late):
        predictor.refresh()
        assert predictor.verdict is Verdict.CURRENT and not predictor.trouble
        assert_equal(predictor, fresh, ROWS)
    assert not list((tmp_path / "chain").glob(".*"))


def test_a_delta_holds_what_an_export_holds(tmp_path):
    world = published_world(tmp_path / "chain", 0)
    world.publish()
    world.train(random.Random(0))
    name = world.publish()
    fresh, following = world.fresh(tmp_path / "fresh"), Predictor.follow(tmp_path / "chain")
    assert_equal(following, fresh, ROWS)
    published = (tmp_path / "chain" / name / "dense.safetensors").read_bytes()
    assert published == (tmp_path / "fresh" / "dense.safetensors").read_bytes()


def test_a_folder_that_vanishes_is_told_until_it_is_back(tmp_path):
    world = published_world(tmp_path / "chain", 0)
    world.publish()
    following = Predictor.follow(tmp_path / "chain")
    version = following.weights.name
    (tmp_path / "chain").rename(tmp_path / "away")
    assert not following.refresh() and following.verdict is Verdict.DAMAGED
    assert following.trouble == f"{tmp_path / 'chain'} holds no publication any more"
    assert following.weights.name == version
    (tmp_path / "away").rename(tmp_path / "chain")
    assert not following.refresh() and following.verdict is Verdict.CURRENT
    world.train(random.Random(0))
    world.publish()
    assert following.refresh() == 1 and not following.trouble


def test_a_base_that_is_pruned_while_it_is_read_has_a_newer_one_in_its_place(tmp_path, monkeypatch):
    world, read = published_world(tmp_path / "chain", 0), follower.read_artifact
    world.publish()

    def goes_on(folder, *given, **options):
        if folder.name == "base-00000001":
            world.train(random.Random(0))
            world.start_ranks(world.plan)
            assert world.publish() == "base-00000002"
            ChainFolder(world.folder).prune(1)
        return read(folder, *given, **options)

    monkeypatch.setattr(follower, "read_artifact", goes_on)
    assert Predictor.follow(world.folder).step == world.step


def test_of_two_runs_that_begin_one_chain_at_once_one_publishes_a_whole_base(tmp_path):
    """Both have exported their base when the first of them gives it its name."""
    one, other = (published_world(tmp_path / "chain", seed, ranks=1) for seed in (0, 1))
    other.step, exports = 7, (one.export, other.export)
    has_exported, may_go_on = threading.Event(), threading.Event()

    def exported_first(checkpoint, out):
        manifest = exports[0](checkpoint, out)
        second.start()
        assert has_exported.wait(60)
        return manifest

    def exported_last(checkpoint, out):
        manifest = exports[1](checkpoint, out)
        has_exported.set()
        assert may_go_on.wait(60)
        return manifest

    def publish(world):
        with suppress(SaveError):
            world.publish()
            published.append(world)

    one.export, other.export = exported_first, exported_last
    published = []
    second = threading.Thread(target=publish, args=(other,))
    publish(one)
    may_go_on.set()
    second.join(60)
    assert len(published) == 1
    following = Predictor.follow(one.folder)
    assert following.step == published[0].step and not following.trouble


def test_a_damaged_base_that_comes_next_is_read_once_a_look(tmp_path, monkeypatch):
    world, read, places = published_world(tmp_path / "chain", 0, ranks=1), ChainFolder.read, []
    world.publish()
    following = Predictor.follow(world.folder)
    world.start_ranks(world.plan)
    (world.folder / world.publish() / "publication.json").write_bytes(b"")
    monkeypatch.setattr(ChainFolder, "read", lambda *given: places.append(given[1]) or read(*given))
    assert not following.refresh() and following.verdict is Verdict.DAMAGED
    assert places == [(2, "base")]


def tables_held() -> int:
    """Copies of tables that this process holds."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("rayrec-tables" in os.readlink(link) for link in links if link.is_symlink())


def test_a_damaged_base_leaves_no_copies_of_its_tables(tmp_path):
    """Each look reads it again, and errors hold the frames that read it."""
    world = published_world(tmp_path / "chain", 0, ranks=1)
    world.publish()
    follower = Follower(world.folder)
    world.start_ranks(world.plan)
    world.train(random.Random(1), scale=1000.0)
    name = world.publish()
    assert name == "base-00000002"
    table = next((world.folder / name).glob("**/tables/*.arrow"))
    damaged = bytearray(table.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    table.write_bytes(damaged)
    gc.collect()
    gc.disable()
    try:
        held = tables_held()
        for _ in range(5):
            assert follower.look() is None and follower.verdict is Verdict.DAMAGED
        assert tables_held() == held
        # who begins falls back to the base before
        another = Follower(world.folder)
        assert another.position.seq == 1 and tables_held() == 2 * held
    finally:
        gc.enable()
