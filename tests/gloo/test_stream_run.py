"""Runs that are fed by a stream: each row is trained on once, on any ranks and after any stop."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.checkpoint import CheckpointManager, Manifest, read_manifest
from rayrec.cli.main import main
from rayrec.data import FeatureSchema
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.writer import ChainWriter, Moment
from rayrec.streams import DeltaConfig, IcebergConfig, StreamConfig, StreamDataset
from rayrec.train import CheckpointConfig, PublishConfig, RankTrainer, TrainSpec, stream_windows
from rayrec.train.config import ENDLESS
from rayrec.train.events import Evaluation, StreamProgress
from tests.clicks import write_clicks
from tests.data.iceberg_tables import NAME, compact, make_table, properties_of
from tests.gloo.shaped import many_of, whole_numbers, write_shaped
from tests.gloo.trainers import spec_of
from tests.ranks import RankPool
from tests.unit.published_worlds import without_programs

# 1003 rows in windows of 300: three steps of 128 each, and one of 103 rows
WINDOWS, STARTS = [300, 300, 300, 103], [0, 3, 6, 9]
Told = list[tuple[str, int, int, int]]
Walked = tuple[Told, dict[str, torch.Tensor], int]  # with whole numbers, and the last step


def write_stream(
    folder: Path, files: int = 7, write: Callable[[Path], object] = write_clicks
) -> None:
    """Write the rows of `write_clicks`, or of others, as files of a stream."""
    write(folder)
    rows = pa.concat_tables(map(pq.read_table, sorted((folder / "train").glob("*.parquet"))))
    (folder / "in").mkdir()
    size = -(-len(rows) // files)
    for k in range(files):
        pq.write_table(rows.slice(k * size, size), folder / "in" / f"part-{k}.parquet")


def streamed(folder: Path, world_size: int, run: str, **options: object) -> TrainSpec:
    config = StreamConfig(
        folder=str(folder / "in"),
        **{"rows": 300, "seconds": 0.05, "stop_after_windows": 4, **options},  # type: ignore[arg-type]
    )
    schema = FeatureSchema.load(folder / "schema.json")
    data = StreamDataset(config=config, schema=schema)
    spec = spec_of(folder, world_size)
    path = str(folder / run)
    return replace(spec, data=data, steps=ENDLESS, run_path=path, report_every_s=1e-6)


def keep_in(told: Told) -> object:
    def keep(event: object) -> None:
        if isinstance(event, Evaluation):
            told.append(("scored", event.window or 0, event.step, int(event.scores["rows"])))
        if isinstance(event, StreamProgress):
            told.append(("open", event.window, event.step, event.rows))

    return keep


def walked(
    rank: int,
    world_size: int,
    folder: Path,
    run: str = "calm",
    table: DeltaConfig | IcebergConfig | None = None,
) -> Walked:
    told: Told = []
    spec = replace(streamed(folder, world_size, run), checkpoint=CheckpointConfig(at_end=False))
    if table is not None:
        source = {"delta" if isinstance(table, DeltaConfig) else "iceberg": table}
        config = replace(spec.data.config, folder=None, **source)
        spec = replace(spec, data=replace(spec.data, config=config))
    with RankTrainer(spec) as trainer:
        assert not trainer.run(on_event=keep_in(told))  # type: ignore[arg-type]
        return told, whole_numbers(trainer), trainer.step


@pytest.fixture(scope="module")
def calm(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Walked:
    """What a run of one rank on the rows of `write_stream` tells and leaves."""
    folder = tmp_path_factory.mktemp("calm")
    write_stream(folder)
    return ranks.run(1, walked, folder)[0]


def test_windows_are_scored_and_trained_on_alike_on_any_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    write_stream(tmp_path)
    told, found, steps = ranks.run(1, walked, tmp_path)[0]
    wanted = []
    for number, (rows, step) in enumerate(zip(WINDOWS, STARTS, strict=True)):
        wanted += [("open", number, step, rows), ("scored", number, step, rows)]
    assert told == wanted and steps == 10
    # the windows are facts of the run: a second walk reads them, and not the source
    (tmp_path / "in").rename(tmp_path / "gone")
    (tmp_path / "in").mkdir()
    same, tables, _ = ranks.run(1, walked, tmp_path)[0]
    on_two = ranks.run(2, walked, tmp_path)
    assert same == wanted and all(other == wanted for other, _, _ in on_two)
    check_tables(found, tables, [each for _, each, _ in on_two])


def append_all(folder: Path) -> DeltaConfig:
    """Append the files of `write_stream` to a table of Delta Lake, and compact it in between."""
    deltalake = pytest.importorskip("deltalake", reason="needs the extra delta")
    for file in sorted((folder / "in").iterdir()):
        deltalake.write_deltalake(folder / "table", pq.read_table(file), mode="append")
        if file.name == "part-3.parquet":
            deltalake.DeltaTable(folder / "table").optimize.compact()
    return DeltaConfig(table=str(folder / "table"))


def append_all_to_iceberg(folder: Path) -> IcebergConfig:
    """Append them to a table of Apache Iceberg, likewise."""
    pytest.importorskip("pyiceberg", reason="needs the extra iceberg")
    pytest.importorskip("sqlalchemy", reason="the catalogs of tests lie in SQLite")
    (folder / "table").mkdir()
    files = sorted((folder / "in").iterdir())
    table = make_table(folder / "table", pq.read_schema(files[0]))
    for file in files:
        table.append(pq.read_table(file))
        if file.name == "part-3.parquet":
            compact(table)
    return IcebergConfig(table=NAME, properties=properties_of(folder / "table"))


@pytest.mark.parametrize(
    "append", [append_all, pytest.param(append_all_to_iceberg, marks=pytest.mark.slow)]
)
def test_a_table_that_is_appended_to_trains_as_the_folder_does(
    ranks: RankPool, tmp_path: Path, append: Callable[[Path], DeltaConfig | IcebergConfig]
) -> None:
    write_stream(tmp_path)
    table = append(tmp_path)
    for world_size in (1, 2):
        calm = ranks.run(world_size, walked, tmp_path, f"calm-{world_size}")
        same = ranks.run(world_size, walked, tmp_path, f"table-{world_size}", table)
        for told, found in zip(calm, same, strict=True):
            assert found[0] == told[0] and found[2] == told[2] == 10
            check_tables(told[1], found[1])


def live(
    spec: TrainSpec, until: int = ENDLESS, **options: Any
) -> tuple[str | None, dict[str, torch.Tensor], int]:
    """Train until a step or to the end: the newest checkpoint, the numbers, and the step."""
    with RankTrainer(spec) as trainer:
        trainer.begin()
        assert trainer.run(lambda: trainer.step >= until, **options) == (until < ENDLESS)
        return trainer.newest, whole_numbers(trainer), trainer.step


def check_tables(
    wanted: dict[str, torch.Tensor],
    alone: dict[str, torch.Tensor],
    on_two: Sequence[dict[str, torch.Tensor]] = (),
) -> None:
    """One rank has the same numbers; several have them up to the order of sums."""
    assert all(torch.equal(wanted[name], alone[name]) for name in wanted)
    for found in on_two:
        for name in wanted:
            assert torch.allclose(wanted[name], found[name], atol=1e-5), name


def go_on(rank: int, world_size: int, folder: Path, stops: tuple[int, ...], run: str) -> Walked:
    """Stop after some steps, go on from the checkpoint, and so on to the end."""
    told: Told = []
    newest: str | None = None
    for after in (*stops, ENDLESS):
        spec = streamed(folder, world_size, run)
        spec = replace(spec, resume_from=(newest,) if newest else ())
        newest, found, step = live(spec, after, on_event=keep_in(told))
    return told, found, step


@pytest.mark.parametrize("stops", [(0, 2), (3,), (1, 3, 4, 6), (5, 9), (9,)])
def test_a_run_goes_on_in_the_window_where_it_stopped(
    ranks: RankPool, calm: Walked, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    write_stream(tmp_path)
    wanted, tables, steps = calm
    told, found, step = ranks.run(1, go_on, tmp_path, stops, "stopped")[0]
    assert step == steps
    # a window that was open, and not begun, is opened once more
    assert sorted(set(told)) == sorted(wanted)
    check_tables(tables, found)


def shaped(
    rank: int, world_size: int, folder: Path, stops: tuple[int, ...], run: str
) -> dict[str, torch.Tensor]:
    """Train several tasks on rows with weights and lists of ids, with some stops."""
    calm = streamed(folder, world_size, run)
    schema = FeatureSchema.load(folder / "many.json")
    data = StreamDataset(config=calm.data.config, schema=schema)
    newest: str | None = None
    for after in (*stops, ENDLESS):
        spec = many_of(folder, world_size, steps=ENDLESS)
        resume_from = (newest,) if newest else ()
        spec = replace(
            spec, data=data, eval_data=None, run_path=calm.run_path, resume_from=resume_from
        )
        newest, found, _ = live(spec, after)
    return found


def test_tasks_weights_and_lists_go_on_from_a_stream(ranks: RankPool, tmp_path: Path) -> None:
    write_stream(tmp_path, write=write_shaped)
    wanted = ranks.run(1, shaped, tmp_path, (), "calm")[0]
    alone = ranks.run(1, shaped, tmp_path, (2, 5), "stopped")[0]
    check_tables(wanted, alone, ranks.run(2, shaped, tmp_path, (4,), "wide"))


@without_programs()
def by_rows(
    rank: int, world_size: int, folder: Path, report_s: float
) -> tuple[list[int], list[int]]:
    """Return the steps at which a run saves, every 250 rows, and publishes, every 400."""
    spec = streamed(folder, world_size, f"by_rows-{world_size}-{report_s}")
    config = CheckpointConfig(every_n_rows=250, at_end=False)
    publish = PublishConfig(every_n_rows=400)
    spec = replace(spec, checkpoint=config, publish=publish, report_every_s=report_s)
    with RankTrainer(spec) as trainer:
        trainer.run()
        chain = ChainFolder.of_run(str(spec.run_path))
        published = [chain.read(place).to_step for place in chain.places()]
        return list(CheckpointManager(str(spec.run_path)).steps()), published


def test_a_run_saves_by_rows_at_the_same_steps_on_any_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    write_stream(tmp_path)
    # steps of 128, 128 and 44 rows of each window, and 103 at the end
    after = list(accumulate([128, 128, 44] * 3 + [103]))
    wanted = []
    for every in (250, 400):
        due = [now // every > before // every for before, now in pairwise([0, *after])]
        wanted.append([step for step, is_due in enumerate(due, 1) if is_due])
    assert wanted[0] == [2, 5, 8, 10]
    # the end is published in any case
    wanted[1] += [10] * (wanted[1][-1] < 10)
    for world_size, report_s in ((1, 1e-6), (1, 60.0), (2, 60.0)):
        for told in ranks.run(world_size, by_rows, tmp_path, report_s):
            assert list(told) == wanted


@without_programs()
def by_events(
    rank: int, world_size: int, folder: Path, stop: int
) -> tuple[list[int], list[int], list[int]]:
    """Return the steps at which a run saves and publishes by its events, stopped after a step."""
    spec = streamed(folder, world_size, f"by_events-{world_size}-{stop}", time="at")
    config = CheckpointConfig(every_event_s=100)
    spec = replace(spec, checkpoint=config, publish=PublishConfig(every_event_s=60))
    newest: tuple[str, ...] = ()
    published = list[list[int]]()
    for until in (stop, ENDLESS):
        newest = (str(live(replace(spec, resume_from=newest), until)[0]),)
        chain = ChainFolder.of_run(str(spec.run_path))
        published.append([chain.read(place).to_step for place in chain.places()])
    steps = list(CheckpointManager(str(spec.run_path)).steps())
    return steps, published[0], published[1]


@pytest.mark.slow
def test_a_run_saves_by_event_time_at_the_same_steps_on_any_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    write_stream(tmp_path)
    # the newest events of the four windows are 90, 130, 130 again, since they are late, and 320
    times = np.repeat([90, 130, 60, 320], WINDOWS)
    for path in sorted((tmp_path / "in").iterdir()):
        rows = pq.read_table(path)
        own, times = times[: len(rows)], times[len(rows) :]
        pq.write_table(rows.append_column("at", pa.array(own)), path)
    for world_size in (1, 2):
        for stop in (1, 6, 7):
            saved, before, behind = ranks.run(world_size, by_events, tmp_path, stop)[0]
            # past 100 with the second window, at step 6, and past 200 and 300 with the last one
            assert saved == sorted({stop, 6, 10})
            assert before == ([6, 7] if stop == 7 else [stop])  # the end is published, too
            assert behind == sorted({stop, 6, 10})


def lost(rank: int, world_size: int, folder: Path, after: int) -> str:
    """Train past a checkpoint, and forget all behind it, as a killed process does."""
    spec = streamed(folder, world_size, "lost")
    spec = replace(spec, checkpoint=CheckpointConfig(every_n_steps=after, at_end=False))
    return str(live(spec, after + 1)[0])


@pytest.mark.parametrize("after", [2, 3, 7])
def test_rows_behind_a_checkpoint_are_trained_on_again_from_the_same_windows(
    ranks: RankPool, calm: Walked, tmp_path: Path, after: int
) -> None:
    write_stream(tmp_path)
    _, tables, _ = calm
    path = ranks.run(1, lost, tmp_path, after)[0]
    assert path.endswith(f"{after:08d}")
    alone = ranks.run(1, resumed, tmp_path, path)[0]
    check_tables(tables, alone, ranks.run(2, resumed, tmp_path, path))


def resumed(rank: int, world_size: int, folder: Path, path: str) -> dict[str, torch.Tensor]:
    return live(replace(streamed(folder, world_size, "lost"), resume_from=(path,)))[1]


def damaged(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    """Go on from the newest checkpoint, beside an older one that is kept and damaged."""
    spec = streamed(folder, world_size, "damaged")
    spec = replace(spec, checkpoint=CheckpointConfig(every_n_steps=1, num_to_keep=3))
    newest = (str(live(spec, 6)[0]),)
    manifest = folder / "damaged" / "step-00000005" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    return live(replace(spec, resume_from=newest))[1]


def test_a_damaged_checkpoint_that_is_kept_ends_no_run(
    ranks: RankPool, calm: Walked, tmp_path: Path
) -> None:
    write_stream(tmp_path)
    _, wanted, _ = calm
    check_tables(wanted, ranks.run(1, damaged, tmp_path)[0])
    left = sorted(path.name for path in (tmp_path / "damaged" / "stream").glob("window-*.json"))
    assert left == ["window-00000001.json", "window-00000002.json", "window-00000003.json"]


def idle(rank: int, world_size: int, folder: Path) -> tuple[bool, int, list[str], str | None]:
    """Wait for rows that do not come, and stop or save meanwhile."""
    phases: list[str] = []
    spec = streamed(folder, world_size, "idle", stop_after_windows=None)
    spec = replace(spec, checkpoint=CheckpointConfig(every_s=1e-3))
    began, manifest = time.monotonic(), folder / "idle" / "step-00000010" / "manifest.json"
    with RankTrainer(spec, on_phase=phases.append) as trainer:

        def stop() -> bool:
            waits = phases[-1] == "waiting for rows of the stream" and trainer.step == 10
            saved = manifest.exists() or time.monotonic() - began > 20
            return waits and rank == world_size - 1 and saved

        stopped = trainer.run(stop)
        return stopped, trainer.step, phases, trainer.newest


def walked_to(rank: int, world_size: int, folder: Path, rows: int) -> tuple[int, bool]:
    """Train on so many rows, twice: the second life has nothing to do."""
    spec = streamed(folder, world_size, "rows", stop_after_windows=None, stop_after_rows=rows)
    newest, steps = "", list[int]()
    for _ in range(2):
        spec = replace(spec, resume_from=(newest,) if newest else ())
        with RankTrainer(spec) as trainer:
            trainer.begin()
            assert not trainer.run()
            newest = trainer.newest or ""
            steps.append(trainer.step)
    assert steps[0] == steps[1]
    return steps[0], (folder / "rows" / "stream" / "window-00000003.json").exists()


def test_a_run_ends_after_its_rows(ranks: RankPool, tmp_path: Path) -> None:
    write_stream(tmp_path)
    # three steps, and the fourth has 10 rows
    assert ranks.run(2, walked_to, tmp_path, 310) == [(4, False)] * 2


def test_a_run_that_waits_saves_what_is_due_and_stops_at_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    write_stream(tmp_path)
    for stopped, step, phases, newest in ranks.run(2, idle, tmp_path):
        assert stopped and step == 10
        assert newest is not None and newest.endswith("00000010")
        waiting = phases.index("waiting for rows of the stream")
        assert "waiting for rows of the stream" in phases[waiting:]


def keys_of(folder: Path, source: str) -> dict[str, object]:
    """Return the keys of a run file for a source, which is filled with rows."""
    if source == "folder":
        return {"folder": folder / "in"}
    if source == "delta":
        return {"delta.table": append_all(folder).table}
    iceberg = append_all_to_iceberg(folder)
    properties = {f"iceberg.properties.{key}": value for key, value in iceberg.properties.items()}
    return {"iceberg.table": iceberg.table, **properties}


@pytest.mark.parametrize(
    ("source", "place", "lost"),
    [
        ("folder", "in", "cannot be listed"),
        pytest.param("delta", "table", "cannot be opened", marks=pytest.mark.slow),
        pytest.param("iceberg", "table", "cannot be opened", marks=pytest.mark.slow),
    ],
)
def test_a_run_file_walks_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, place: str, lost: str
) -> None:
    """Windows and lag are in the run's events; kept windows are those of kept checkpoints."""
    write_stream(tmp_path)
    told = tmp_path / "result.json"
    keys = {
        "data.schema": tmp_path / "schema.json",
        **{f"data.stream.{key}": value for key, value in keys_of(tmp_path, source).items()},
        "data.stream.rows": 300,
        "data.stream.seconds": 0.05,
        "data.stream.stop_when_idle_s": 1.0,
        "run.storage_path": tmp_path / "runs",
        "run.name": "a",
        "run.global_batch_size": 128,
        "run.checkpoint.every_n_steps": 1,
        "run.checkpoint.num_to_keep": 1,
        "run.publish.every_n_steps": 2,
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "--local", "--result", str(told), *words]) == 0
    said = capsys.readouterr().out
    assert "window 1 of the stream: 300 rows; 403 more wait" in said and "step 10 " in said
    result = json.loads(told.read_text())
    assert [one["rows"] for one in result["windows"]] == WINDOWS
    lines = [json.loads(line) for line in (tmp_path / "runs" / "a" / "events.jsonl").open()]
    opened = [line for line in lines if line["event"] == "stream"]
    assert [one["lag_rows"] for one in opened] == [703, 403, 103, 0]
    kept = sorted(os.listdir(tmp_path / "runs" / "a" / "stream"))
    assert [name.removesuffix(".json")[:15] for name in kept if name.startswith("window")] == [
        "window-00000002",
        "window-00000003",
        "window-00000003",
    ]
    assert "window-00000002.json" in kept
    # also in the middle of a window whose predecessor is not kept any more
    chain = ChainFolder.of_run(tmp_path / "runs" / "a")
    ages = [(one.to_step, one.ingest_time) for one in map(chain.read, chain.places())]
    assert [step for step, ingest in ages if ingest is not None] == [4, 6, 8, 10], ages
    # a second life waits for new rows, and has nothing to do
    again = [*words, "--set", "run.resume_from=latest"]
    (tmp_path / place).rename(tmp_path / "away")
    assert main(["train", "--local", *again]) == 2
    assert lost in capsys.readouterr().err
    (tmp_path / "away").rename(tmp_path / place)
    assert main(["train", "--local", *again]) == 0
    assert "done: step 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"run.epochs": 2}, "epochs=2, and a stream is walked once"),
        ({"run.accumulate": 2}, "accumulate=2, and windows of a stream begin at any step"),
        ({"run.storage_path": "none", "run.name": None}, "give run.storage_path and leave"),
        ({"run.dense_schedule.decay": "linear"}, "dense_schedule with decay='linear'"),
        ({"data.train": "x"}, "does not go with train"),
        ({"data.stream.rows": 0}, "rows=0"),
        ({"data.stream.folder": "none"}, "has no source"),
        ({"data.stream.delta.table": "x"}, "has two sources"),
        ({"data.stream.folder": None, "data.stream.delta.first_version": 1}, "table"),
        ({"data.stream.iceberg.table": "a.b"}, "has two sources"),
        ({"data.stream.folder": None, "data.stream.iceberg.table": "b"}, "namespace.name"),
        (
            {
                "data.stream.folder": None,
                "data.stream.delta.table": "x",
                "data.stream.delta.first_version": -1,
            },
            "first_version=-1",
        ),
        ({"model.model": "sasrec"}, "[data.stream] is for click models"),
    ],
)
def test_what_does_not_go_with_a_stream_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: dict[str, object], why: str
) -> None:
    write_stream(tmp_path)
    keys: dict[str, object] = {
        "data.schema": tmp_path / "schema.json",
        "data.stream.folder": tmp_path / "in",
        "run.storage_path": tmp_path / "runs",
        "run.name": "a",
        **said,
    }
    words = [f"{key}={value}" for key, value in keys.items() if value is not None]
    assert main(["train", "--local", *(w for word in words for w in ("--set", word))]) == 2
    assert why in capsys.readouterr().err


@without_programs()
def test_servers_get_the_last_rows_of_a_stream_that_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta that has to be a base is followed by one, though no step comes."""
    write_stream(tmp_path)
    publish_delta = ChainWriter.publish_delta

    def gives_up(writer: ChainWriter, shards: Any, moment: Moment, gather: Any) -> bool:
        return moment.step != 10 and publish_delta(writer, shards, moment, gather)

    monkeypatch.setattr(ChainWriter, "publish_delta", gives_up)
    spec = streamed(tmp_path, 1, "silent", stop_after_windows=None)
    spec = replace(spec, publish=PublishConfig(every_s=1e-3))
    published: list[int] = []
    with RankTrainer(spec) as trainer:
        chain = ChainFolder.of_run(tmp_path / "silent" / "published")

        def stop() -> bool:
            if trainer.step == 10:
                published.append(chain.read(chain.places()[-1]).to_step)
            return len(published) > 40 or published[-1:] == [10]

        trainer.run(stop)
    assert published[0] < 10 and published[-1] == 10


def test_a_checkpoint_that_is_deleted_meanwhile_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the next save deletes old checkpoints while windows are looked through."""
    write_stream(tmp_path)
    looks: list[str] = []

    def look(path: str) -> Manifest:
        looks.append(path)
        if len(looks) == 4:
            shutil.rmtree(path)
        return read_manifest(path)

    monkeypatch.setattr(stream_windows, "read_manifest", look)
    spec = streamed(tmp_path, 1, "raced")
    config = CheckpointConfig(every_n_steps=1, num_to_keep=1)
    with RankTrainer(replace(spec, checkpoint=config)) as trainer:
        assert not trainer.run()
    assert len(looks) > 4
    kept = [path.name[:15] for path in (tmp_path / "raced" / "stream").glob("*.arrow")]
    assert kept == ["window-00000003"], "later saves delete what that one left"
