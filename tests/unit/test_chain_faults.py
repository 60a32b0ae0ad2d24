"""Faults on the way from training to a server: the follower's tables are always those of a version
that was published, and heal when the folder does.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from rayrec.errors import ArtifactError
from rayrec.serve.chain.folder import PUBLISHED, ChainFolder
from rayrec.serve.chain.follower import Follower
from rayrec.serve.chain.publication import PUBLICATION
from rayrec.serve.chain.version_policy import Verdict
from rayrec.train import RankTrainer, TrainSpec
from tests.dynamic_clicks import TABLE, write
from tests.gloo.dynamic_spec import HALF, publishing
from tests.unit.checkpoint_worlds import random_plan
from tests.unit.published_worlds import PublishedWorld, assert_found, published_world

pytestmark = pytest.mark.slow
SCHEDULES = 50  # of each of 20 seeds
State = tuple[bytes, ...]


def state_of(follower: Follower) -> State:
    """The bytes that a replica scores with: every table, its ids, the powers, the dense part."""
    version = follower.version
    packed = follower.copies.tables(version.copy, version.powers)
    tables = []
    for number in range(len(packed.tables)):
        tables.append(packed.rows_of(number).contiguous().numpy().tobytes())
        if (ids := packed.ids_of(number)) is not None:
            assert_found(ids)
            tables.append(ids.keys.numpy().tobytes())
    return (*tables, repr(version.powers).encode(), version.dense)


def known_of(follower: Follower) -> set[int]:
    """The ids that have a row."""
    version = follower.version
    packed = follower.copies.tables(version.copy, version.powers)
    found = [packed.ids_of(number) for number in range(len(packed.tables))]
    return {key for ids in found if ids is not None for key in ids.keys.tolist()} - {-1}


class Chains(NamedTuple):
    """Folders of whole chains, and the state of every version of them."""

    own: Path
    fork: Path
    states: dict[str, State]

    def names(self) -> list[str]:
        return sorted(os.listdir(self.own), key=lambda name: name[-8:])


def grow(world: PublishedWorld, rng: random.Random, states: dict[str, State], count: int) -> None:
    """Publish some more, and keep the states; the fifth comes from new ranks."""
    for number in range(count):
        world.train(rng)
        if number == 4:
            world.start_ranks(random_plan(rng, world.truths, 2))
        world.publish()
        follower = Follower(world.folder)
        while follower.look() is not None:
            pass
        states[follower.version.name] = state_of(follower)


@pytest.fixture(scope="module", params=["static", "dynamic"])
def chains(tmp_path_factory, request) -> Chains:
    folder = tmp_path_factory.mktemp("chains")
    return static(folder) if request.param == "static" else dynamic(folder)


def static(folder: Path) -> Chains:
    """Chains of tables without ids of their own."""
    rng, states = random.Random(0), dict[str, State]()
    world = published_world(folder / "own", 0, ranks=2)
    grow(world, rng, states, 3)
    # a second process goes on from the same place
    shutil.copytree(folder / "own", folder / "fork")
    other = copy.deepcopy(world)
    other.folder = folder / "fork"
    for writer in other.writers:
        writer._folder = ChainFolder(other.folder)
    grow(world, rng, states, 6)
    grow(other, rng, states, 4)
    return Chains(folder / "own", folder / "fork", states)


def dynamic(folder: Path) -> Chains:
    """Chains of a run whose ids come and go, and of one that goes on apart from its middle."""
    rule = {"blocks": 4, "admission_threshold": 2, "ttl_steps": 3}
    data = write(folder / "data", TABLE | {"dynamic": rule})
    run, other = folder / "run", folder / "other"
    train(replace(publishing(data, 1, run), steps=HALF))
    shutil.copytree(run, other)
    for path in (run, other):
        saved = (str(path / f"step-{HALF:08d}"),)
        spec = replace(publishing(data, 1, path), resume_from=saved)
        faster = replace(spec.sparse_optimizer, lr=0.5)  # and so other rows
        train(spec if path == run else replace(spec, sparse_optimizer=faster))
    own, fork = (ChainFolder.of_run(path).path for path in (run, other))
    states = dict[str, State]()
    for path in (own, fork):
        names = sorted(os.listdir(path), key=lambda name: name[-8:])
        shutil.copytree(path / names[0], folder / "so-far" / names[0])
        follower = Follower(folder / "so-far")
        states[follower.version.name] = state_of(follower)
        known, left, back = known_of(follower), set[int](), set[int]()
        for name in names[1:]:
            shutil.copytree(path / name, folder / "so-far" / name)
            assert follower.look() is not None
            states[follower.version.name] = state_of(follower)
            left |= known - known_of(follower)
            known = known_of(follower)
            back |= left & known
        assert back and left - back, "ids leave for ever, and some come back"
        shutil.rmtree(folder / "so-far")
    return Chains(own, fork, states)


def train(spec: TrainSpec) -> None:
    with RankTrainer(spec) as trainer:
        trainer.begin()
        trainer.run()


class Mirror:
    """A folder that a follower reads, and that a copying program with faults fills."""

    def __init__(self, path: Path, chains: Chains, rng: random.Random) -> None:
        self.path, self._chains, self._rng = path, chains, rng
        self._names = chains.names()
        path.mkdir()
        shutil.copytree(chains.own / self._names[0], path / self._names[0])
        self._arrived = 1

    def fault(self) -> None:
        """One event: something arrives, is lost, or is damaged."""
        events = (self.arrive, self.arrive, self.arrive, self.swap, self.drop, self.cut)
        more = (self.damage, self.misplace, self.foreign, self.heal)
        self._rng.choice((*events, *more))()

    def _copy(self, name: str) -> None:
        shutil.rmtree(self.path / name, ignore_errors=True)
        shutil.copytree(self._chains.own / name, self.path / name)

    def arrive(self) -> None:
        """The next publication, or one that was there before."""
        if self._rng.random() < 0.8 and self._arrived < len(self._names):
            self._arrived += 1
        self._copy(self._names[self._arrived - 1])

    def swap(self) -> None:
        """One that comes before its turn."""
        self._copy(self._rng.choice(self._names[self._arrived - 1 :]))

    def drop(self) -> None:
        self._arrived = min(len(self._names), self._arrived + 1)
        present = sorted(os.listdir(self.path))
        if len(present) > 1:
            shutil.rmtree(self.path / self._rng.choice(present))

    def cut(self) -> None:
        """A copy that was killed between two of its writes, or amid one."""
        name = self._names[min(self._arrived, len(self._names) - 1)]
        source, target = self._chains.own / name, self.path / name
        shutil.rmtree(target, ignore_errors=True)
        files = [path for path in source.rglob("*") if path.is_file()]
        self._rng.shuffle(files)
        for path in files[: self._rng.randrange(len(files))]:
            to = target / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes()
            to.write_bytes(content[: self._rng.choice([len(content), len(content) // 2])])

    def damage(self) -> None:
        """A file is truncated, or one of its bits flipped."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        if not files:
            return
        path = self._rng.choice(files)
        content = bytearray(path.read_bytes())
        if not content:
            return
        if self._rng.random() < 0.3:
            content = content[: self._rng.randrange(len(content))]
        else:
            content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(content)

    def misplace(self) -> None:
        """A publication in the place of another."""
        one, other = self._rng.choice(self._names), self._rng.choice(self._names)
        shutil.rmtree(self.path / other, ignore_errors=True)
        shutil.copytree(self._chains.own / one, self.path / other)

    def foreign(self) -> None:
        """A publication of another history, in whole or its publication.json alone."""
        name = self._rng.choice(os.listdir(self._chains.fork))
        if self._rng.random() < 0.5:
            shutil.copytree(self._chains.fork / name, self.path / name, dirs_exist_ok=True)
        elif (self.path / name).is_dir():
            shutil.copy(self._chains.fork / name / PUBLICATION, self.path / name / PUBLICATION)

    def heal(self) -> None:
        """What has arrived is whole again."""
        for name in self._names[: self._arrived]:
            self._copy(name)

    def heal_all(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self._chains.own, self.path)


@pytest.mark.seeds(range(20))
def test_any_schedule_of_faults_leaves_a_published_version(seed, chains, tmp_path):
    for number in range(SCHEDULES):
        rng = random.Random(seed * SCHEDULES + number)
        mirror = Mirror(tmp_path / str(number), chains, rng)
        strict = rng.random() < 0.7 or chains.own.name == PUBLISHED  # of dynamic tables always
        follower = Follower(mirror.path, strict=strict)
        for _ in range(rng.randint(5, 25)):
            mirror.fault()
            if rng.random() < 0.1:  # the server is killed and started again
                with suppress(ArtifactError):
                    follower = Follower(mirror.path, strict=strict)
            for _ in range(rng.randint(0, 3)):
                before = follower.version.name
                version = follower.look()
                assert (version is None) == (follower.version.name == before)
                assert (follower.verdict is Verdict.CURRENT) == (not follower.trouble)
                assert state_of(follower) == chains.states[follower.version.name]
        mirror.heal_all()
        while follower.look() is not None:
            pass
        if follower.verdict is Verdict.CURRENT:
            newest = Follower(chains.own)
            while newest.look() is not None:
                pass
            assert state_of(follower) == state_of(newest)
        else:  # it had begun to follow the other history, of which it tells
            assert follower.verdict is Verdict.FORK
            assert state_of(follower) == chains.states[follower.version.name]
        shutil.rmtree(mirror.path)


def publish_until(at: int, folder: Path, world: PublishedWorld) -> None:
    """Publish, and end this process before its n-th change of the folder."""
    left = [at]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        writing = (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax")
        )
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
        if (writing or changes) and str(folder) in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

    sys.addaudithook(hook)
    world.publish()


def killed(at: int, folder: Path, world: PublishedWorld) -> bool:
    """Publish in a process that is killed before its n-th change of the folder; whether it was."""
    # A fork of this process, which has threads, may find a lock of one of them held for ever.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.published_worlds"])
    process = context.Process(target=publish_until, args=(at, folder, world))
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


@pytest.mark.parametrize("kind", ["delta", "base"])
def test_a_run_that_is_killed_between_two_writes_leaves_a_whole_chain(kind, tmp_path):
    rng, own = random.Random(0), tmp_path / "chain"
    world = published_world(own, 0, ranks=2)
    world.publish()
    before = Follower(own)
    world.train(rng)
    if kind == "base":
        world.start_ranks(world.plan)
    saved = tmp_path / "saved"
    shutil.copytree(own, saved)
    deaths = 0
    for at in range(1, 1000):
        shutil.rmtree(own)
        shutil.copytree(saved, own)
        is_killed = killed(at, own, world)
        follower = Follower(own)
        version = follower.look() if kind == "delta" else follower.version
        if is_killed:
            deaths += 1
            # the last write gives the publication its name
            assert version is None or version.name == before.version.name
            assert state_of(follower) == state_of(before)
        else:
            assert version.name != before.version.name
            break
    assert deaths > 8
