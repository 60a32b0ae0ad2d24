"""Files as they were written before: each is read as the same value, which is written as they are.

The files lie in `tests/golden`. Digests and signatures are taken of some of them, so not a byte
may change. A file that a later version writes otherwise stays, and is still read.
"""

from __future__ import annotations

import json
import tomllib
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayrec.checkpoint.manifest import Manifest as CheckpointManifest
from rayrec.errors import DamagedCheckpointError
from rayrec.layout import ShardingPlan, Topology
from rayrec.layout.schema import FeatureSchema
from rayrec.planner.constraints import constraints_from_json
from rayrec.runs.run_file import RunFile
from rayrec.serve.chain.publication import Publication
from rayrec.serve.manifest import Manifest as ArtifactManifest
from rayrec.train.callbacks import RunInfo
from rayrec.train.events import (
    Evaluation,
    Failure,
    Noticed,
    ProgressReport,
    Recovered,
    Resized,
    Saved,
)
from rayrec.watch import EventLog, read_events
from tests.unit.golden_values import (
    ARTIFACT,
    BARE_ARTIFACT,
    BARE_PLAN,
    BASE,
    CONSTRAINTS,
    DELTA,
    ESTIMATES,
    IN_USE,
    INCREMENT,
    PLAN,
    RANK,
    RUN,
    SCHEMA,
    SMALL_SCHEMA,
    TOPOLOGY,
    WHOLE,
)

GOLDEN = Path(__file__).parents[1] / "golden"


class Record(NamedTuple):
    """A file, the value that it holds, and how the value is read and written."""

    file: str
    value: Any
    read: Callable[[str], Any]
    write: Callable[[Any], str]


def _manifest(kind: Any) -> tuple[Callable[[str], Any], Callable[[Any], str]]:
    return (
        lambda text: kind.from_bytes(text.encode(), "here"),
        lambda value: value.to_bytes().decode(),
    )


RECORDS = [
    Record("plan.json", PLAN, ShardingPlan.from_json, ShardingPlan.to_json),
    Record("bare_plan.json", BARE_PLAN, ShardingPlan.from_json, ShardingPlan.to_json),
    Record("topology.json", TOPOLOGY, Topology.from_json, Topology.to_json),
    Record("schema.json", SCHEMA, FeatureSchema.from_json, FeatureSchema.to_json),
    Record("small_schema.json", SMALL_SCHEMA, FeatureSchema.from_json, FeatureSchema.to_json),
    Record("checkpoint.json", WHOLE, *_manifest(CheckpointManifest)),
    Record("rows_in_use.json", IN_USE, *_manifest(CheckpointManifest)),
    Record("increment.json", INCREMENT, *_manifest(CheckpointManifest)),
    Record("artifact.json", ARTIFACT, *_manifest(ArtifactManifest)),
    Record("bare_artifact.json", BARE_ARTIFACT, *_manifest(ArtifactManifest)),
    Record("base.json", BASE, *_manifest(Publication)),
    Record("delta.json", DELTA, *_manifest(Publication)),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.file)
def test_a_file_is_read_as_its_value_and_written_as_it_was(record: Record) -> None:
    text = (GOLDEN / record.file).read_text(encoding="utf-8")
    value = record.read(text)
    assert value == record.value
    assert record.write(value) == text == record.write(record.value)


@pytest.mark.parametrize("record", [ARTIFACT, DELTA], ids=["artifact", "delta"])
def test_version_1_of_what_is_served_is_still_read(record: Any) -> None:
    text = (GOLDEN / f"{type(record).__name__.lower()}_1.json").read_bytes()
    value = type(record).from_bytes(text, "here")
    assert value == replace(record, sha256=value.sha256) and value.sha256 != record.sha256


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("files", 3, "columns", 0, 2), "64", r"files\[3\]\.columns\[0\]\[2\] is '64'; it must"),
        (("files", 1, "marks", 2), [7], r"files\[1\]\.marks\[2\] is \[7\]; it must be a list of 2"),
        (("files", 0, "rows"), [0, True], r"files\[0\]\.rows\[1\] is true; it must be a whole n"),
        (("files", 7, "row"), [0, 1], r"files\[7\] has the unknown field 'row'; did you mean"),
        (("tables", 0), {"name": "a"}, r"tables\[0\] has no field 'num_embeddings'; give it a who"),
        (("parent",), {"name": "a", "sha256": ""}, "an increment has a parent, and only an incre"),
    ],
)
def test_a_manifest_that_was_edited_says_where(
    place: tuple[Any, ...], value: object, says: str
) -> None:
    body = json.loads((GOLDEN / "checkpoint.json").read_text(encoding="utf-8"))
    del body["crc32"]
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    with pytest.raises(
        DamagedCheckpointError, match=rf"^here/manifest\.json cannot be read: .*{says}"
    ):
        CheckpointManifest.from_bytes(json.dumps(body).encode(), "here")


def test_estimates_are_read_as_they_were() -> None:
    # two plans that differ in their estimates alone are equal
    plan = ShardingPlan.from_json((GOLDEN / "plan.json").read_text(encoding="utf-8"))
    assert plan.estimates == ESTIMATES


def test_constraints_are_read_as_they_were() -> None:
    text = (GOLDEN / "constraints.json").read_text(encoding="utf-8")
    assert constraints_from_json(text) == CONSTRAINTS


def test_a_run_file_is_read_as_it_was_and_printed_alike() -> None:
    read = RunFile.read(str(GOLDEN / "run.toml"))
    assert (read.model, read.data, read.scaling, read.run, read.plan) == (
        RUN.model,
        RUN.data,
        RUN.scaling,
        RUN.run,
        RUN.plan,
    )
    old = tomllib.loads((GOLDEN / "run.toml").read_text(encoding="utf-8"))
    assert read.to_toml() == RUN.to_toml()
    # a later version has more options, and writes these as before
    assert old == part_of(tomllib.loads(RUN.to_toml()), old)


def part_of(table: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The part of a table that has the keys of another one, and so its tables."""
    return {
        key: part_of(table[key], value) if isinstance(value, dict) and value else table[key]
        for key, value in keys.items()
    }


def tell(log: EventLog) -> None:
    log.on_start(
        RunInfo(
            name="a",
            run_path="/runs/a",
            steps=100,
            first_step=0,
            world_size=4,
            hosts=("one", "one", "two", "two"),
            plan=PLAN,
            settings={"lr": 0.1, "scores": ("auc", "ne"), "bound": float("inf")},
            predicted=(RANK,) * 4,
        )
    )
    log.on_window(
        ProgressReport(
            step=50,
            rows=25600,
            rows_per_s=1000.0,
            loss=0.5,
            auc=0.75,
            data_wait=(0.0, 0.5),
            scores={"auc": 0.75},
            learning_rates={"sparse": 0.1},
            memory_bytes=(1, 2),
            step_s={"lookup": 0.001},
        )
    )
    log.on_evaluation(Evaluation(step=50, scores={"auc": 0.75}, rows=1000, seconds=1.5, best=True))
    log.on_checkpoint(Saved(step=50, path="/runs/a/step-00000050", seconds=0.25, best=True))
    log.on_notice(Noticed(step=60, host="two", ranks=(2, 3), seconds=30.0, answer="leave"))
    log.on_failure(Failure(step=60, rank=3, host="two", cause="OSError: gone"))
    log.on_recovery(
        Recovered(
            step=50,
            path=None,
            failed_step=60,
            rank=3,
            host="two",
            cause="OSError: gone",
            seconds=5.5,
            replaced=True,
            in_memory=True,
        )
    )
    log.on_resize(Resized(step=50, ranks_before=4, ranks=3, lost=True, seconds=2.5))
    log.on_end(RuntimeError("later"))


def test_events_are_read_as_they_were_and_written_alike(tmp_path: Path) -> None:
    tell(EventLog(tmp_path))
    again, golden = read_events(tmp_path), read_events(GOLDEN / "events.jsonl")
    assert len(golden.events) == 10
    for one, other in zip(again.events, golden.events, strict=True):
        values = {**one.values, **({"rayrec": "0"} if one.kind == "start" else {})}
        assert (one.kind, one.step, values) == (other.kind, other.step, other.values)
    lines = [(folder / "events.jsonl").read_text().splitlines() for folder in (tmp_path, GOLDEN)]
    for own, old in zip(*lines, strict=True):
        # only the time and the version of the two lines differ
        assert [*json.loads(own)] == [*json.loads(old)]
        assert own.partition('"step"')[2].partition(',"rayrec"')[0] in old
