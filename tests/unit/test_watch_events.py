"""The log of a run's events: what is written, in which lives, and what a reader makes of it."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from rayrec.driver.ray_metrics import METRICS
from rayrec.errors import ConfigError, InputError, RunInterrupted, SaveError, TrainingFailed
from rayrec.layout import ShardingPlan
from rayrec.train.events import StreamProgress
from rayrec.watch import EventLog, event_file, read_events
from rayrec.watch.event_log import LATER, with_event_log
from rayrec.watch.run_page import run_page
from rayrec.watch.schema import OUTCOMES, RECORDS, names_of
from tests.limits import files_up_to
from tests.watched import info, planned, report, tell


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def steps(events) -> list[int]:
    return [event.step for event in events]


def test_every_event_is_a_line_with_all_of_its_fields(tmp_path: Path):
    error = TrainingFailed("rank 1 of 2 failed", 1, "10.0.0.2", "OSError: gone")
    tell(EventLog(tmp_path / "a"), 400, until=200, lost_at=100)
    tell(EventLog(tmp_path / "a"), 400, first=200, until=300, error=error)
    written = lines(tmp_path / "a")
    assert {line["event"] for line in written} == set(RECORDS)
    for line in written:
        named = {"event", "at", "step", *names_of(line["event"])}
        assert set(line) <= named and named - set(line) <= set(LATER)
    assert written[-2] | {"at": 0} == {
        "event": "failure",
        "at": 0,
        "step": 300,
        "cause": "TrainingFailed: rank 1 of 2 failed",
        "rank": 1,
        "host": "10.0.0.2",
    }
    assert [line["outcome"] for line in written if line["event"] == "end"] == ["stopped", "failed"]
    at = [line["at"] for line in written]
    assert at == sorted(at) and at[0] > 1.7e9


def test_the_start_has_the_plan_and_the_settings(tmp_path: Path):
    log = EventLog(tmp_path)
    settings = {"lr": math.inf, "path": Path("/x"), "scores": (len, "auc"), "plan": planned()}
    log.on_start(replace(info(100), settings=settings))
    log.on_end(None)
    start = read_events(tmp_path).start.values
    assert ShardingPlan.from_json(json.dumps(start["plan"])) == planned()
    assert start["settings"]["lr"] is None and start["settings"]["path"] == "/x"
    assert start["settings"]["scores"] == ["len", "auc"]
    assert start["settings"]["plan"]["type"] == "ShardingPlan"


def test_numbers_that_are_not_finite_are_null(tmp_path: Path):
    log = EventLog(tmp_path)
    log.on_start(info(100))
    odd = replace(report(50), loss=math.nan, scores={"a": math.inf, "b": 0.5})
    log.on_window(odd)
    log.on_end(None)
    text = (tmp_path / "events.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    (window,) = read_events(tmp_path).of("window")
    assert window.values["loss"] is None and window.values["scores"] == {"a": None, "b": 0.5}


@pytest.mark.parametrize("ended", [True, False])
def test_a_later_life_takes_back_what_lies_behind_its_first_step(tmp_path: Path, ended: bool):
    log = EventLog(tmp_path)
    tell(log, 1000, until=500, error=OSError("disk") if ended else None)
    tell(EventLog(tmp_path), 1000, first=400)
    events = read_events(tmp_path)
    assert steps(events.of("window")) == list(range(50, 1001, 50))
    assert [w.life for w in events.of("window")] == [0] * 8 + [1] * 12
    assert steps(events.of("evaluation")) == [200, 400, 600, 800, 1000]
    assert steps(events.of("checkpoint")) == [200, 400, 600, 800, 1000]
    assert len([e for e in events.events if e.kind == "window"]) == 10 + 12
    assert steps(events.of("start")) == [0, 400]
    assert steps(events.of("failure")) == ([500] if ended else []), (
        "a failure happened all the same"
    )


def test_a_recovery_takes_back_what_lies_behind_it(tmp_path: Path):
    tell(EventLog(tmp_path), 400, lost_at=200)
    events = read_events(tmp_path)
    assert steps(events.of("window")) == list(range(50, 401, 50))
    assert len([e for e in events.events if e.kind == "window"]) == 9, "that of step 200 twice"
    assert steps(events.of("failure")) == [200] and steps(events.of("recovery")) == [150]
    assert events.events[-1].values["outcome"] == "done"


def test_a_run_that_starts_anew_in_its_folder_takes_everything_back(tmp_path: Path):
    tell(EventLog(tmp_path), 1000, until=500)
    tell(EventLog(tmp_path), 1000, until=100)
    assert steps(read_events(tmp_path).of("window")) == [50, 100]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_that_was_cut_by_a_kill_is_passed_over(tmp_path: Path, cut: int):
    file = tmp_path / "events.jsonl"
    tell(EventLog(tmp_path), 1000, until=500)
    whole = file.read_bytes().splitlines(keepends=True)
    window = max(i for i, line in enumerate(whole) if b'"window"' in line)
    file.write_bytes(b"".join(whole[:window]) + whole[window][:-cut])
    assert steps(read_events(tmp_path).of("window"))[-1] == (500 if cut == 1 else 450)
    tell(EventLog(tmp_path), 1000, first=400)
    assert steps(read_events(tmp_path).of("window")) == list(range(50, 1001, 50))
    assert file.read_bytes().count(b'{"event"') == file.read_bytes().count(b"\n")


def test_a_broken_line_is_named(tmp_path: Path):
    file = tmp_path / "events.jsonl"
    tell(EventLog(tmp_path), 200)
    good = file.read_text().splitlines()
    window = next(i for i, line in enumerate(good) if '"window"' in line)
    for broken, said in (
        (good[window][:50], r"line 2 of .*events\.jsonl is no JSON: "),
        ("[1, 2]", r"line 2 of .* is \[1, 2\]; it must be an object"),
        ("{}", "line 2 of .* has no field 'event'"),
        (good[window].replace('"step":50', '"step":-50'), "step is -50; it must be 0 or more"),
        (good[window].replace('"loss":0', '"loss":"0"+'), "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        (
            good[window].replace('"rows":', '"rows_":'),
            "has the unknown field 'rows_'; did you mean",
        ),
        (good[window].replace('"rows":', '"rows":5.5,"rows_per_s":'), "rows is 5.5; it must be a"),
        (good[window].replace('"scores":{', '"scores":{"x":"y",'), r"scores\.x is 'y'; it must be"),
        (good[window].replace('"ne":', '"ne":Infinity,"auc":'), "ne is inf; it must be a finite"),
    ):
        file.write_text("\n".join([*good[:window], broken, *good[window + 1 :], ""]))
        with pytest.raises(InputError, match=said) as error:
            read_events(tmp_path)
        assert "\n" not in str(error.value)
    file.write_text("\n".join(good[1:]))
    with pytest.raises(
        InputError, match=r"line 1 of .* is a window, and a run's events begin with"
    ):
        read_events(tmp_path)
    file.write_text(good[0].replace('"format":1', '"format":2'))
    with pytest.raises(InputError, match="has format 2, of a later rayrec; this one reads 1"):
        read_events(tmp_path)


def test_every_run_with_a_folder_has_one_log(tmp_path: Path):
    other = EventLog(tmp_path / "other")
    first, *rest = with_event_log((other,), str(tmp_path / "a"))
    assert isinstance(first, EventLog) and first.path == str(tmp_path / "a") and rest == [other]
    assert with_event_log((other,), other.path) == (other,)
    assert with_event_log((other,), None) == (other,)


def test_an_event_of_a_later_version_is_passed_over(tmp_path: Path):
    tell(EventLog(tmp_path), 200)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event":"merger","at":1.5,"step":200}\n')
    assert len(read_events(tmp_path).of("window")) == 4


def test_a_recovery_of_an_older_version_has_the_defaults_of_later_fields(tmp_path: Path):
    later = {"dropped": False, "in_memory": False, "spare": False}
    tell(EventLog(tmp_path), 400, lost_at=200)
    old = [{k: v for k, v in line.items() if k not in later} for line in lines(tmp_path)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    (recovery,) = read_events(tmp_path).of("recovery")
    assert {name: recovery.values[name] for name in later} == later


def test_no_run_and_no_events_are_said(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"there is no run at .*nowhere; name the folder of a run"
    ):
        read_events(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no events; name the folder"):
        read_events(tmp_path)
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match="has no events yet"):
        read_events(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the events of nothing://x"):
        read_events("nothing://x")


def test_a_log_reads_as_its_folder_or_as_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tell(EventLog(f"file://{tmp_path}/a"), 200)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "a", "a", "a/events.jsonl", f"file://{tmp_path}/a"):
        assert len(read_events(path).of("window")) == 4


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write events to .*file/run/events\.jsonl"):
        EventLog(tmp_path / "file" / "run")
    log = EventLog(tmp_path / "later" / "run")
    assert not (tmp_path / "later").exists(), "only a run that starts leaves something"
    (tmp_path / "later").touch()
    with pytest.raises(SaveError, match=r"cannot write events to .*later/run"):
        log.on_start(info(100))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_later_is_one_warning_and_the_lines_follow(tmp_path: Path):
    log = EventLog(tmp_path)
    log.on_start(info(200))
    local = log._file._file
    disk = local._file
    with Path("/dev/full").open("wb", buffering=0) as full:
        local._file = full
        with pytest.warns(RuntimeWarning, match=r"No space left.*training goes on") as warned:
            log.on_window(report(50))
            log.on_window(report(100))
    assert len(warned) == 1
    local._file = disk
    log.on_window(report(150))
    log.on_end(None)
    assert steps(read_events(tmp_path).of("window")) == [50, 100, 150]


def test_a_life_that_a_full_disk_ended_in_its_first_line_is_passed_over(tmp_path: Path):
    tell(EventLog(tmp_path), 200)
    file = tmp_path / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    log = EventLog(tmp_path)
    with (
        files_up_to(file.stat().st_size + 30),
        pytest.raises(SaveError, match="cannot write events to"),
    ):
        log.on_start(info(400, 200))
    tell(EventLog(tmp_path), 400, first=200)
    run = read_events(tmp_path)
    assert len(run.of("start")) == 2
    assert steps(run.of("window")) == [*range(50, 401, 50)]


def test_the_log_of_a_long_run_stays_small_and_has_its_whole_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(event_file, "MOST_BYTES", 60_000)
    windows, sizes = 2000, list[int]()

    class Watched(EventLog):
        def on_window(self, report, trainer=None):
            super().on_window(report)
            self.on_stream(StreamProgress(step=report.step, window=report.step, rows=9, cut_s=1.0))
            sizes.append((tmp_path / "events.jsonl").stat().st_size)

    tell(Watched(tmp_path), windows * 50 + 500, until=windows * 50, lost_at=500)
    assert sizes[-1] > 30_000 and max(sizes) < 66_000 and sizes[30] > 20_000
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"win')  # a driver that was killed
    tell(EventLog(tmp_path), windows * 50 + 500, first=windows * 50)
    run = read_events(tmp_path)
    told = steps(run.of("window"))
    assert told == sorted(told) and told[-10:] == list(range(100_050, 100_501, 50))
    # older windows are further apart, and none of the course is left out
    assert told[0] < 10_000 and max(b - a for a, b in pairwise(told)) < 20_000
    assert len(run.of("stream")) > 10
    assert [len(run.of(kind)) for kind in ("start", "failure", "recovery", "end")] == [2, 1, 1, 2]
    assert sum(e.values["final"] for e in run.of("evaluation")) == 2
    admitted = sum(e.values["ids"]["user"]["admitted"] for e in run.of("window"))
    # readers sum them
    assert admitted == 30 * (windows + 10)
    assert "100,500" in run_page([run])


def test_a_log_that_cannot_be_thinned_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = EventLog(tmp_path)
    log.on_start(info(200))
    monkeypatch.setattr(event_file, "MOST_BYTES", 10)
    log._file._file._thin_at = 10
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: (_ for _ in ()).throw(OSError("full")))
    with pytest.warns(RuntimeWarning, match=r"cannot write events .*full.*training goes on"):
        log.on_window(report(50))
        log.on_window(report(100))
    monkeypatch.undo()
    log.on_end(None)
    assert steps(read_events(tmp_path).of("window")) == [50, 100]


class OneStore:
    """Every mock:// URI leads to one file system that, as an object store, cannot append."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.filesystem = fs.FileSystem.from_uri("mock:///x")[0]
        self.writes = 0
        self.refuses = False

        def resolve(path: str):
            return self, path.removeprefix("mock://").rstrip("/")

        for module in ("event_file", "events"):
            monkeypatch.setattr(f"rayrec.watch.{module}.resolve", resolve)

    def open_output_stream(self, path: str, compression: None):
        if self.refuses:
            raise pa.ArrowException("503 slow down")
        self.writes += not path.endswith(".probe")
        return self.filesystem.open_output_stream(path, compression=compression)

    def __getattr__(self, name: str):
        assert "append" not in name
        return getattr(self.filesystem, name)

    def names(self) -> list[str]:
        return sorted(i.base_name for i in self.get_file_info(fs.FileSelector("/run")))


def test_an_object_store_gets_parts_that_stay_small(monkeypatch: pytest.MonkeyPatch):
    store = OneStore(monkeypatch)
    monkeypatch.setattr(event_file, "PART_BYTES", 3_000)
    tell(EventLog("mock:///run"), 1000, until=500)
    first = store.names()
    assert first[:2] == ["events-000001.jsonl", "events-000002.jsonl"] and len(first) > 2
    tell(EventLog("mock:///run"), 1000, first=400)
    assert store.names()[: len(first)] == first and len(store.names()) > len(first)
    events = read_events("mock:///run")
    assert steps(events.of("window")) == list(range(50, 1001, 50))
    assert steps(events.of("start")) == [0, 400]


def test_an_object_store_is_written_to_at_once_only_for_what_matters(
    monkeypatch: pytest.MonkeyPatch,
):
    store = OneStore(monkeypatch)
    log = EventLog("mock:///run")
    log.on_start(info(10_000))
    for step in range(50, 5001, 50):
        log.on_window(report(step))
    assert store.writes == 1 and len(read_events("mock:///run").events) == 1
    monkeypatch.setattr(event_file, "FLUSH_S", 0.0)
    log.on_window(report(5050))
    assert store.writes == 2 and len(read_events("mock:///run").of("window")) == 101
    store.refuses = True
    with pytest.warns(RuntimeWarning, match="503 slow down"):
        log.on_window(report(5100))
    store.refuses = False
    log.on_end(RunInterrupted(2))
    events = read_events("mock:///run")
    assert len(events.of("window")) == 102 and events.of("end")[0].values == {"outcome": "stopped"}
    assert not events.of("failure")


def test_the_page_names_every_field_of_every_event():
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    told = {}
    for event, fields in re.findall(r"^\| `([a-z]+)` \| [^|`]* \| (.*) \|$", page, re.MULTILINE):
        told[event] = re.findall(r"`(\w+)`", fields)
    assert told.pop("end") == ["outcome", *OUTCOMES]
    assert told == {event: names_of(event) for event in RECORDS if event != "end"}


def test_the_page_names_every_metric_and_its_labels():
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    told = {}
    for names, labels in re.findall(r"^\| (`rayrec_.*?) \| [^|]* \|(.*)\|$", page, re.MULTILINE):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), tuple(re.findall(r"`(\w+)`", labels)))
    assert told == {name: metric.labels for name, metric in METRICS.items()}
