"""`rayrec serve --follow` as processes: every answer is that of the version that it names."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from rayrec.serve import Predictor
from rayrec.serve.artifact import DENSE
from rayrec.serve.server.leading import DenseFile
from tests.unit.published_worlds import assert_equal, published_world
from tests.unit.serve_worlds import rows
from tests.unit.served_processes import Answers, Server, following, said, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ASKED = rows(12, 5).drop_columns(["click"])
DELTAS = 12


def all_say(server: Server, state: str, version: str) -> bool:
    """Whether both replicas say so; each connection reaches any of them."""
    told: dict[str, tuple[str, str]] = {}
    for _ in range(40):
        one = said(server)
        told[one["pid"]] = (one["chain"], one["version"])
        if len(told) == 2:
            break
    return len(told) == 2 and set(told.values()) == {(state, version)}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow  # it holds six
def test_replicas_are_told_dense_parts_of_more_than_2_gib():
    file, content = DenseFile(), bytes(2**31) + b"end"
    for one in (b"first", content, b"shorter"):
        file.write(one)
        assert file.read() == one


def test_every_answer_under_load_is_that_of_one_version(tmp_path):
    rng, world = random.Random(0), published_world(tmp_path / "chain", 0)
    world.publish()
    mine = Predictor.follow(world.folder)
    wanted = {mine.weights.name: mine.predict(ASKED).numpy()}
    with following(world.folder) as server, Answers(server, ASKED) as load:
        victim = server.replicas()[0]
        for number in range(DELTAS):
            world.train(rng)
            world.publish()
            assert mine.refresh() == 1
            wanted[mine.weights.name] = mine.predict(ASKED).numpy()
            if number == DELTAS // 2:
                os.kill(victim, signal.SIGKILL)
            if number % 3 == 0:
                wait_for(lambda: said(server)["version"] == mine.weights.name)
        wait_for(lambda: len(server.replicas()) == 2 and victim not in server.replicas())
        # the replica that came last follows at its own pace
        step = f"rayrec_serve_step {float(world.step)}"
        wait_for(lambda: step in server.get("/metrics").decode())
        seen = len(load.told)
        wait_for(lambda: len(load.told) > seen + 200)
        metrics = server.get("/metrics").decode()
        assert 'rayrec_serve_chain{state="current"} 1.0' in metrics
        assert server.number("rayrec_serve_staleness_seconds") > 0
    assert not load.errors
    for version, step, scores in load.told:
        assert version.startswith(f"{step}-")
        np.testing.assert_allclose(scores, wanted[version], rtol=1e-5, atol=1e-6)
    assert len({version for version, _, _ in load.told}) > 3
    assert load.times == {(step, 10 * step, step + 0.125) for _, step, _ in load.told}
    assert {version for version, _, _ in load.told[-100:]} == {mine.weights.name}
    assert_equal(mine, world.fresh(tmp_path / "fresh"), ASKED.to_pylist())


def test_what_is_damaged_or_forked_is_not_served(tmp_path):
    rng, world, served = (
        random.Random(1),
        published_world(tmp_path / "chain", 1),
        tmp_path / "served",
    )

    def bring(name: str) -> None:
        shutil.copytree(world.folder / name, tmp_path / "coming")
        served.mkdir(exist_ok=True)
        os.rename(tmp_path / "coming", served / name)

    bring(world.publish())
    with following(served, "--in-place") as server:
        for _ in range(2):
            world.train(rng)
            bring(world.publish())
            wait_for(lambda: all_say(server, "current", world.writers[0].head.version))
        served_now = world.writers[0].head.version
        world.train(rng)
        name = world.publish()
        shutil.copytree(world.folder / name, tmp_path / "damaged")
        flip(tmp_path / "damaged" / DENSE)
        os.rename(tmp_path / "damaged", served / name)
        wait_for(lambda: all_say(server, "damaged", served_now))
        assert f"{DENSE} is damaged" in said(server)["trouble"]
        shutil.copy(world.folder / name / DENSE, served / name / DENSE)
        served_now = world.writers[0].head.version
        wait_for(lambda: all_say(server, "current", served_now))
        other = published_world(tmp_path / "other", 1)
        other.publish()
        other.train(rng)
        shutil.rmtree(served)
        wait_for(lambda: all_say(server, "damaged", served_now))
        assert "holds no publication any more" in said(server)["trouble"]
        assert 'rayrec_serve_chain{state="damaged"} 1.0' in server.get("/metrics").decode()
        shutil.copytree(other.folder, served)
        wait_for(lambda: all_say(server, "fork", served_now))
        other.publish()
        shutil.copytree(other.folder, served, dirs_exist_ok=True)
        time.sleep(0.5)
        # while the files are exchanged, one of them may be read in part
        wait_for(lambda: all_say(server, "fork", served_now))


def test_a_server_whose_log_nobody_reads_goes_on(tmp_path):
    rng, world = random.Random(2), published_world(tmp_path / "chain", 2)
    world.publish()
    with following(world.folder) as server:
        server.process.stdout.close()
        server.process.stderr.close()
        victim = server.replicas()[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: victim not in server.replicas())
        wait_for(lambda: len(server.replicas()) == 2, 20)
        world.train(rng)
        world.publish()
        served_now = world.writers[0].head.version
        wait_for(lambda: all_say(server, "current", served_now))
        world.train(rng)
        flip(world.folder / world.publish() / DENSE)
        wait_for(lambda: all_say(server, "damaged", served_now))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(200) == 0
