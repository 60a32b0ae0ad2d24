"""Publications of dynamic tables: what follows them has what an export has, at every step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rayrec.driver.planning import find_tables
from rayrec.errors import ConfigError
from rayrec.layout import column_wise, grid_shard, row_wise
from rayrec.serve import Predictor, export
from rayrec.serve.chain.folder import ChainFolder
from tests.dynamic_clicks import TABLE, write
from tests.gloo.dynamic_spec import STEPS, publishing
from tests.gloo.trainers import begin_and_run
from tests.ranks import RankPool
from tests.unit.published_worlds import bytes_of, without_programs
from tests.worlds import plan_for

# rows and rules; the last table is never full, so that ids leave it by their time alone
RULES = {
    "counted": (64, {"blocks": 4, "admission_threshold": 2, "ttl_steps": 3}),
    "pressed": (64, {"blocks": 2, "eviction": "lfu"}),
    "timed": (1024, {"blocks": 4, "eviction": "none", "ttl_steps": 2}),
    "seconds": (1024, {"blocks": 4, "eviction": "timestamp", "ttl_s": 30}),
}


@without_programs()
def publish(rank: int, world_size: int, data: Path, folder: Path, kind: str) -> None:
    """Publish and save at every step."""
    whole = publishing(data, world_size, folder)
    (table,) = find_tables(whole.model)
    every = list(range(world_size))
    layout = {
        "row": lambda: row_wise(table, every),
        "column": lambda: column_wise(table, every),
        "grid": lambda: grid_shard(table, (every[:2], every[2:])),
    }[kind]()
    plan = plan_for(world_size, {"t_user": layout})
    begin_and_run(replace(whole, plan=plan))


@pytest.mark.parametrize(
    ("kind", "world_size", "rule"),
    [
        ("row", 2, "counted"),
        pytest.param("column", 2, "timed", marks=pytest.mark.slow),
        pytest.param("row", 2, "seconds", marks=pytest.mark.slow),
        pytest.param("grid", 4, "pressed", marks=pytest.mark.slow),
    ],
)
@without_programs()
def test_what_follows_has_what_an_export_has_at_every_step(
    ranks: RankPool, tmp_path: Path, kind: str, world_size: int, rule: str
) -> None:
    rows, dynamic = RULES[rule]
    data = write(tmp_path / "data", TABLE | {"num_embeddings": rows, "dynamic": dynamic})
    ranks.run(world_size, publish, data, tmp_path / "run", kind)
    chain = ChainFolder.of_run(tmp_path / "run")
    places, copied = chain.places(), tmp_path / "copied"
    assert len(places) == STEPS and places[0].kind == "base"
    assert len([place for place in places if place.kind == "delta"]) > STEPS // 2
    following, gone = None, 0
    for step, place in enumerate(places, 1):
        shutil.copytree(chain.folder(place), copied / place.name)
        if following is None:
            following = Predictor.follow(copied)
        else:
            before = keys_of(following)
            assert following.refresh() == 1, following.trouble
            lost = sorted(before - keys_of(following))
            gone += len(lost)
            check_unknown(following, lost)
        fresh = tmp_path / f"fresh-{step}"
        export(tmp_path / "run" / f"step-{step:08d}", fresh, types="int8")
        assert bytes_of(following) == bytes_of(Predictor.load(fresh))
    assert gone > 10
    late = Predictor.follow(copied)
    assert bytes_of(late) == bytes_of(following)
    with pytest.raises(ConfigError, match="'t_user' is dynamic, and a row may belong to another"):
        Predictor.follow(copied, strict=False)


def keys_of(predictor: Predictor) -> set[int]:
    (collection,) = predictor.collections.values()
    return set(collection.packed.ids_of(0).keys.tolist()) - {-1}


def check_unknown(predictor: Predictor, ids: list[int]) -> None:
    """Ids that one publication took back score as one that never was."""
    rows = [{"d": 0.5, "user": one} for one in (*ids, 12345)]
    scores = predictor.predict(rows).numpy()
    assert np.array_equal(scores, np.full_like(scores, scores[-1]))
