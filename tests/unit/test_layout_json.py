"""Plans and topologies go through JSON unchanged, and every wrong field is a PlanError that says
where.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from rayrec.errors import PlanError
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, Topology
from rayrec.planner import EmbeddingShardingPlanner
from tests.unit.plan_worlds import random_plan


@pytest.mark.seeds(range(100))
def test_json_gives_the_plan_back(seed: int) -> None:
    plan = random_plan(seed)
    text = plan.to_json()
    again = ShardingPlan.from_json(text)
    assert again == plan and list(again.tables) == list(plan.tables)
    assert again.to_json() == text


def planned() -> ShardingPlan:
    tables = [
        EmbeddingBagConfig(1000 * 10**i, 32, f"t{i}", feature_names=[f"f{i}"]) for i in range(4)
    ]
    return EmbeddingShardingPlanner(Topology.uniform(2, 2, 10**9), batch_size=128).plan(tables)


def test_estimates_travel_with_the_plan(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    again = ShardingPlan.load(tmp_path / "plan.json")
    assert again == plan and again.estimates == plan.estimates and again.report() == plan.report()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_estimates_are_for_the_tables_of_the_plan() -> None:
    data = json.loads(planned().to_json())
    del data["tables"]["t2"]
    with pytest.raises(PlanError, match=r"^a\.json: estimates\.tables: table 't2' is"):
        ShardingPlan.from_json(json.dumps(data), "a.json")


def test_a_table_is_one_line() -> None:
    lines = [line for line in random_plan(3).to_json().splitlines() if '"storage"' in line]
    assert len(lines) == len(random_plan(3).tables) > 0


GOOD: dict[str, Any] = {
    "format": "rayrec.plan",
    "version": 1,
    "world_size": 2,
    "hosts": [[0, 1]],
    "tables": {
        "user": {
            "kind": "row_wise",
            "row_cuts": [0, 5, 10],
            "col_cuts": [0, 8],
            "owners": [[0], [1]],
            "storage": {"kind": "device"},
        },
        "day": {"shape": [7, 16], "replicated": [0, 1], "storage": {"kind": "device"}},
    },
}
MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "other", ["format", "'other'", "no sharding plan"]),
        ("version", 2, ["version is 2", "reads version 1"]),
        ("world_size", MISSING, ["no field 'world_size'"]),
        ("world_size", True, ["world_size is true; it must be a whole number"]),
        ("world_size", 3, ["hosts name 2 ranks", "world_size=3"]),
        ("hosts", [0, 1], ["hosts[0] is 0; it must be a list"]),
        ("tables", [], ["tables is []; it must be an object"]),
        ("tables.user", 7, ["tables.user is 7; it must be an object"]),
        ("tables.user.row_cuts", MISSING, ["tables.user has no field 'row_cuts'"]),
        ("tables.user.row_cuts", [0, 5.0, 10], ["tables.user.row_cuts[1] is 5.0; "]),
        ("tables.user.row_cuts", [0, True, 10], ["tables.user.row_cuts[1] is true; "]),
        ("tables.user.row_cuts", [0, 11, 10], [": tables.user: row_cuts="]),
        ("tables.user.row_cuts", [0, 5, 2**63], ["row_cuts[2] is 9", "64 bits"]),
        ("tables.user.col_cuts", "0,8", ["tables.user.col_cuts is '0,8'; ", "a list"]),
        (
            "tables.user.storage",
            {"kind": "cached"},
            ["tables.user.storage: cached", "needs a load"],
        ),
        ("tables.user.storage", {"kind": "cached", "load_factor": 2}, ["user.storage: ", "2.0"]),
        (
            "tables.user.storage",
            {"loadfactor": 0},
            ["user.storage has the unknown field 'loadfactor'"],
        ),
        ("tables.user.owners", [[0], [2]], ["table 'user'", "rank 2"]),
        ("tables.user.owners", [[0], ["1"]], ["tables.user.owners[1][0] is '1'; "]),
        ("tables.user.rows", 10, ["tables.user has the unknown field 'rows'"]),
        ("tables.user.storage", MISSING, ["tables.user has no field 'storage'"]),
        ("tables.user.storage", {"kind": "disk"}, ["storage.kind is 'disk'; ", "'host'"]),
        ("tables.user.storage", {}, ["tables.user.storage has no field 'kind'"]),
        ("tables.day.replicated", [], ["tables.day: "]),
        ("tables.day.shape", [7], ["tables.day.shape is [7]; it must be a list of 2"]),
        ("tables.day.shape", [7, 0], ["tables.day: shape=[7, 0]"]),
        ("tables.day.shape", MISSING, ["tables.day has no field 'shape'"]),
        ("tabels", {}, ["unknown field 'tabels'; did you mean tables?"]),
        ("estimates", {"tables": {}}, [": estimates has no field 'topology'"]),
    ],
)
def test_a_wrong_field_is_named_with_its_file_and_table(
    tmp_path: Path, path: str, value: object, words: list[str]
) -> None:
    data = json.loads(json.dumps(GOOD))
    assert ShardingPlan.from_json(json.dumps(data)).world_size == 2
    *outer, last = path.split(".")
    inner = functools.reduce(dict.__getitem__, outer, data)
    inner[last] = value
    if value is MISSING:
        del inner[last]
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        ShardingPlan.load(file)
    assert all(word in str(caught.value) for word in [str(file), *words]), str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"format": NaN}',
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        '{"version": 1' + "0" * 5000 + "}",
        "\udcff",
    ],
)
def test_text_that_is_no_json_object_is_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError, match=r"^my file"):
        ShardingPlan.from_json(text, source="my file")


def test_a_table_written_twice_is_refused() -> None:
    text = json.dumps(GOOD).replace('"day"', '"user"')
    with pytest.raises(PlanError, match="'user' occurs twice"):
        ShardingPlan.from_json(text)


def test_a_file_that_cannot_be_read_is_a_plan_error(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe{}")
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "latin"):
        with pytest.raises(PlanError, match="cannot read the plan"):
            ShardingPlan.load(path)


@pytest.mark.seeds(range(40))
def test_damaged_text_is_a_plan_error_or_a_plan(seed: int) -> None:
    rng = random.Random(seed)
    text = planned().to_json()
    for _ in range(25):
        at = rng.randrange(len(text))
        odd = (
            text[:at]
            + rng.choice(["", "0", "-", '"', "[", "]", "null", "1e999", "9" * 400])
            + text[at + rng.randrange(6) :]
        )
        try:
            ShardingPlan.from_json(odd).report()
        except PlanError:
            continue


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("device", "tpu", "'tpu'"),
        ("memory_bytes", [1], "names 1 ranks"),
        ("memory_bw", "fast", "memory_bw is 'fast'; it must be a number"),
        ("speed", 1, "unknown field 'speed'"),
    ],
)
def test_topology_goes_through_json_and_names_wrong_fields(
    field: str, value: object, words: str
) -> None:
    topology = Topology.uniform(2, 3, 10**9, "cuda", memory_bw=1.25e12)
    assert Topology.from_json(topology.to_json()) == topology
    data = {**json.loads(topology.to_json()), field: value}
    with pytest.raises(PlanError, match=f"cluster.json.*{words}"):
        Topology.from_json(json.dumps(data), source="cluster.json")
