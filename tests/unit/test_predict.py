"""Folders of predictions: whose scores they hold, in which order, what is refused, what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli.main import main
from rayrec.data import ArrowDataset, ParquetDataset
from rayrec.driver import CheckpointConfig, Driver, RunConfig, ScalingConfig
from rayrec.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    RayrecError,
    SaveError,
    TrainingFailed,
)
from rayrec.recipe import ModelRecipe
from rayrec.serve import Predictor, export, predict_files
from rayrec.serve.bulk import units_of
from tests.unit.serve_worlds import World, a_world, rows

ROOT = Path(__file__).parents[2]
SIZES = (230, 3, 310)  # rows of the files


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return a_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "int8"
    export(world.checkpoint, out, data=world.data)
    return out


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows without labels in folders that spell a day, in row groups of 70, with a key."""
    folder = tmp_path_factory.mktemp("given")
    first = 0
    for number, count in enumerate(SIZES):
        table = rows(count, seed=number).drop_columns(["click"])
        table = table.append_column("key", pa.array([f"k{first + i}" for i in range(count)]))
        (folder / f"day={number}").mkdir()
        pq.write_table(table, folder / f"day={number}" / "a.parquet", row_group_size=70)
        first += count
    return folder


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of several files."""
    monkeypatch.setattr("rayrec.serve.bulk.PART_ROWS", 150)
    monkeypatch.setattr("rayrec.train.bulk.PART_ROWS", 150)


def unlabelled(folder: Path, world: World, where: str | None = None) -> ParquetDataset:
    return ParquetDataset(str(folder), world.schema, where=where, with_labels=False)


def a_driver(world: World, data: ParquetDataset | None = None, batch: int = 64) -> Driver:
    recipe = ModelRecipe(
        model="dlrm", schema=world.schema.to_json(), dense_layers=(16,), over_layers=(16,)
    )
    keep = CheckpointConfig(at_end=False)
    run = RunConfig(global_batch_size=batch, epochs=1, checkpoint=keep, progress="off")
    return Driver(recipe, None, ScalingConfig(num_workers=0), run, eval_data=data)


def test_an_artifact_scores_rows_as_its_predictor_in_their_order(
    world: World, served: Path, given: Path, small_parts: None, tmp_path: Path
) -> None:
    data = unlabelled(given, world)
    out = tmp_path / "new" / "scores"
    told = predict_files(served, data, out, columns=["key", "day", "words"], batch_size=32)
    assert (told.path, told.rows) == (str(out), sum(SIZES))
    names = sorted(path.name for path in out.iterdir())
    assert names == [f"part-{n:05d}.parquet" for n in range(told.parts)] and told.parts > 3
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scores"]
    assert out.stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o777
    got = pa.concat_tables([pq.read_table(out / name) for name in names])
    assert got.column_names == ["score", "key", "day", "words"]
    assert got["key"].to_pylist() == [f"k{i}" for i in range(sum(SIZES))]
    assert got["day"].to_pylist() == [n for n, count in enumerate(SIZES) for _ in range(count)]
    table = pa.concat_tables([rows(count, seed=n) for n, count in enumerate(SIZES)])
    assert got["words"].to_pylist() == table["words"].to_pylist()
    predictor, scores = Predictor.load(served), got["score"].to_pylist()
    first = 0
    for unit in units_of(data):  # a batch crosses borders of row groups and files, not of parts
        end = first + sum(chunk.rows for chunk in unit)
        for start in range(first, end, 32):
            wanted = predictor.predict(table.slice(start, min(32, end - start)))
            assert scores[start : start + len(wanted)] == wanted.tolist()
        first = end


def test_a_checkpoint_scores_rows_as_its_evaluation_does(
    world: World, given: Path, small_parts: None, tmp_path: Path
) -> None:
    labelled = tmp_path / "labelled"
    for number, count in enumerate(SIZES):
        (labelled / f"day={number}").mkdir(parents=True)
        pq.write_table(rows(count, seed=number), labelled / f"day={number}" / "a.parquet")
    options = ["--global-batch-size", "64", "--local"]
    line = ["predict", world.checkpoint, "--data", str(labelled), *options]
    assert main([*line, "--out", str(tmp_path / "one.parquet")]) == 0
    wanted = pq.read_table(tmp_path / "one.parquet")
    out = tmp_path / "scores"
    told = a_driver(world, unlabelled(given, world)).predict(
        world.checkpoint, str(out), columns=["key", "day"]
    )
    assert (told.path, told.rows, told.parts) == (str(out), sum(SIZES), -(-sum(SIZES) // 150))
    parts = [pq.read_table(path) for path in sorted(out.iterdir())]
    assert [part.num_rows for part in parts] == [150, 150, 150, 93]
    got = pa.concat_tables(parts)
    assert got["score"].equals(wanted["score"])  # bit for bit
    assert got["key"].to_pylist() == [f"k{i}" for i in range(sum(SIZES))]
    # labels are not read, where there are some
    again = ParquetDataset(str(labelled), world.schema)
    a_driver(world).predict(world.checkpoint, str(tmp_path / "again"), again, ["click"])
    same = pq.read_table(tmp_path / "again")
    assert same["score"].equals(got["score"]) and same["click"].equals(wanted["label"])


@pytest.mark.slow
def test_the_command_takes_artifacts_and_checkpoints(
    world: World, served: Path, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ["--data", str(given), "--where", "day = 2 and item < 30", "--columns", "key"]
    models = {"a": [str(served), "--workers", "1"], "c": [world.checkpoint, "--local"]}
    taken = [f"k{233 + i}" for i, item in enumerate(rows(310, 2)["item"].to_pylist()) if item < 30]
    for name, model in models.items():
        out = str(tmp_path / name)
        assert main(["predict", *model, *some, "--out", out, "--batch-size", "50"]) == 0
        told = capsys.readouterr().out.splitlines()[-1]
        assert told == f"predictions: {out} ({len(taken)} rows, 1 files)"
        assert pq.read_table(out)["key"].to_pylist() == taken
    scores = [pq.read_table(tmp_path / name)["score"].to_numpy() for name in models]
    assert scores[0] == pytest.approx(scores[1], abs=0.01)  # INT8 rows and FP32 rows


@pytest.mark.parametrize(
    ("out", "columns", "says"),
    [
        ("{data}", [], "lies among the data"),
        ("{data}/scores", [], "lies among the data"),
        ("{full}", [], r"holds 'a' and more; predictions go to a new or empty folder"),
        ("{full}/a", [], "is a file, or lies in one"),
        ("{full}/a/b", [], "is a file, or lies in one|cannot write out"),
        ("s3://bucket/scores", [], "another file system"),
        ("/proc/nothing/scores", [], r"cannot write out \(--out\)"),
        ("/", [], "holds|among the data"),
        ("{full}/new", ["nothing"], "'nothing' is missing"),
        ("{full}/new", ["score"], "'score' has the name of the scores"),
        ("{full}/new", ["key", "key"], "'key' is named twice"),
        ("{full}/new", ["mixed"], r"other types in .*day=1.*mixed"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_scored(
    world: World, served: Path, given: Path, tmp_path: Path, out: str, columns: list[str], says: str
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    data = tmp_path / "data"
    for number, mixed in enumerate((pa.array([1, 2, 3]), pa.array(["x", "y", "z"]))):
        (data / f"day={number}").mkdir(parents=True)
        table = pq.read_table(given / "day=1" / "a.parquet", partitioning=None)
        pq.write_table(table.append_column("mixed", mixed), data / f"day={number}" / "a.parquet")
    before = sorted(tmp_path.rglob("*"))
    path = out.format(data=data, full=tmp_path)
    with pytest.raises((ConfigError, InputError), match=says):
        predict_files(served, unlabelled(data, world), path, columns=columns)
    with pytest.raises((ConfigError, InputError), match=says):
        a_driver(world).predict(world.checkpoint, path, unlabelled(data, world), columns)
    assert sorted(tmp_path.rglob("*")) == before


def test_rows_that_cannot_be_scored_leave_nothing(
    world: World, served: Path, given: Path, tmp_path: Path
) -> None:
    table = pq.read_table(given / "day=2" / "a.parquet", partitioning=None)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "a.parquet"
    before = {tmp_path / "data", file}

    def refused(error: type[RayrecError], says: str) -> None:
        data = unlabelled(tmp_path / "data", world)
        with pytest.raises(error, match=says):
            predict_files(served, data, tmp_path / "new" / "scores", batch_size=40)
        with pytest.raises(error, match=says):
            a_driver(world).predict(world.checkpoint, str(tmp_path / "new" / "scores"), data)
        assert set(tmp_path.rglob("*")) == before

    items = table["item"].to_pylist()
    at = table.column_names.index("item")
    bad = table.set_column(at, "item", pa.array([*items[:250], 60, *items[251:]]))
    for statistics in (True, False):
        pq.write_table(bad, file, row_group_size=70, write_statistics=statistics)
        refused(InputError, r"column 'item'\) holds id 60 in row 250 of .*a\.parquet")
    pq.write_table(table, file, row_group_size=70, compression="snappy")
    whole = bytearray(file.read_bytes())
    metadata = pq.read_metadata(file)
    place = metadata.row_group(2).column(0).data_page_offset
    whole[place : place + 60] = bytes(range(200, 140, -1))
    file.write_bytes(whole)
    refused(InputError, r"cannot read .*a\.parquet' as Parquet")


def test_an_empty_folder_is_taken_and_a_full_one_is_never_replaced(
    world: World, served: Path, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scores"
    out.mkdir()
    predict_files(served, unlabelled(given, world), out)
    assert len(list(out.iterdir())) == 1
    other = tmp_path / "other"
    real = Predictor.predict_batch

    def slow(self: Predictor, batch: object) -> object:
        """Another process puts a file there while rows are scored."""
        other.mkdir(exist_ok=True)
        (other / "mine").write_text("mine")
        return real(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Predictor, "predict_batch", slow)
    with pytest.raises(SaveError, match=r"cannot write predictions to .*other"):
        predict_files(served, unlabelled(given, world), other)
    assert [path.name for path in other.iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "scores"]


def test_columns_take_the_type_that_holds_all_files(
    world: World, served: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for number, kind in enumerate((pa.int16(), pa.int64())):
        table = rows(20, number).append_column("n", pa.array(range(20), kind))
        with pa.ipc.new_file(str(tmp_path / "data" / f"{number}.arrow"), table.schema) as file:
            file.write_table(table)
    data = ArrowDataset(str(tmp_path / "data"), world.schema)
    predict_files(served, data, tmp_path / "out", columns=["n", "click"])
    got = pq.read_table(tmp_path / "out")
    assert got.schema.field("n").type == pa.int64()
    assert got["n"].to_pylist() == [*range(20), *range(20)]


def test_columns_that_do_not_join_are_refused_before_anything_is_scored(
    world: World, served: Path, small_parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that no block has rows of together need not join."""
    scored = []
    real = Predictor.predict_batch
    monkeypatch.setattr(
        Predictor, "predict_batch", lambda self, batch: scored.append(1) or real(self, batch)
    )
    for name, sizes in (("apart", (150, 150)), ("together", (150, 100, 50))):
        (tmp_path / name).mkdir()
        for number, count in enumerate(sizes):
            table = rows(count, number)
            at = table.column_names.index("item")
            if number == len(sizes) - 1:
                listed = pa.array([[item] for item in table["item"].to_pylist()])
                table = table.set_column(at, "item", listed)
            pq.write_table(table, tmp_path / name / f"{number}.parquet")
    told = predict_files(served, unlabelled(tmp_path / "apart", world), tmp_path / "out")
    assert told.rows == 300 and scored
    scored.clear()
    with pytest.raises(InputError, match=r"columns differ in type between files: .*item"):
        predict_files(served, unlabelled(tmp_path / "together", world), tmp_path / "none")
    assert not scored and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_driver_exports_what_it_trained(
    world: World, given: Path, tmp_path: Path, served: Path
) -> None:
    driver = a_driver(world, world.data)
    manifest = driver.export(world.checkpoint, str(tmp_path / "out"))
    assert manifest.step == 7 and manifest.recipe is not None
    assert manifest.parity["rows_of"] == Predictor.load(served).manifest.parity["rows_of"]
    table = rows(30, 3)
    scores = Predictor.load(tmp_path / "out").predict(table)
    assert torch.equal(scores, Predictor.load(served).predict(table))
    with pytest.raises(ConfigError, match=r"checkpoint is None.*Result\.checkpoint"):
        driver.export(None, str(tmp_path / "none"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Driver\.predict needs data"):
        a_driver(world).predict(world.checkpoint, str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="nowhere"):
        driver.predict(str(tmp_path / "nowhere"), str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_files(
    world: World, served: Path, given: Path, small_parts: None, tmp_path: Path
) -> None:
    data = unlabelled(given, world, "item < 50")
    for workers in (1, 2, 3):
        out = tmp_path / str(workers)
        predict_files(served, data, out, columns=["key"], workers=workers, batch_size=32)
        files = {path.name: path.read_bytes() for path in out.iterdir()}
        if workers == 1:
            wanted = files
        assert files == wanted and len(files) > 3


@pytest.mark.slow
def test_the_errors_of_workers_are_those_of_one_process(
    world: World, served: Path, given: Path, small_parts: None, tmp_path: Path
) -> None:
    table = pq.read_table(given / "day=2" / "a.parquet", partitioning=None)
    ages = table["age"].to_pylist()
    at = table.column_names.index("age")
    table = table.set_column(at, "age", pa.array([*ages[:250], float("nan"), *ages[251:]]))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    data = unlabelled(tmp_path / "a.parquet", world)
    with pytest.raises(InputError, match=r"'age' holds nan in row 250 of .*a\.parquet"):
        predict_files(served, data, tmp_path / "out", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def many(folder: Path, files: int = 80) -> Path:
    """Rows whose scoring takes some seconds."""
    folder.mkdir()
    pq.write_table(rows(20_000), folder / "00.parquet", row_group_size=5000)
    for number in range(1, files):
        os.link(folder / "00.parquet", folder / f"{number:02d}.parquet")
    return folder


def until(holds: object, seconds: float = 120) -> None:
    """Wait until a function returns something that is true."""
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def begun(folder: Path) -> bool:
    """Whether a file of scores is being written."""
    return bool(list(folder.glob(".rayrec-*/part-*")))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_is_ended_leaves_no_folder_that_looks_whole(
    served: Path, tmp_path: Path, workers: str, number: signal.Signals
) -> None:
    data = many(tmp_path / "data")
    (tmp_path / "out").mkdir()
    line = ["predict", str(served), "--data", str(data), "--out", str(tmp_path / "out" / "scores")]
    started = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rayrec.cli.main",
            *line,
            "--workers",
            workers,
            "--batch-size",
            "32",
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until(lambda: begun(tmp_path / "out") or started.poll() is not None)
        assert started.poll() is None, started.communicate()
        if number == signal.SIGINT:
            os.killpg(started.pid, number)  # as a terminal does
        else:
            started.send_signal(number)
        _, err = started.communicate(timeout=60)
    finally:
        started.kill()
    assert not (tmp_path / "out" / "scores").exists()
    if number != signal.SIGKILL:
        assert started.returncode == 128 + number, err
        assert err == f"interrupted by {number.name}\n"
        assert not list((tmp_path / "out").iterdir())
    until(lambda: not processes_of(started.pid))


def processes_of(session: int) -> list[int]:
    """Processes of a session that are alive."""
    alive = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            alive.append(int(path.name))
    return alive


@pytest.mark.slow
def test_a_worker_that_dies_ends_all_in_one_line(
    world: World, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayrec.serve import workers

    killed = []

    def look() -> None:
        """Kill one worker once a file of scores is being written."""
        if begun(tmp_path) and not killed:
            killed.append(pool._all[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    real = workers.WorkerPool.run

    def run(self, units, _):  # type: ignore[no-untyped-def]
        nonlocal pool
        pool = self
        return real(self, units, look)

    pool: workers.WorkerPool = None  # type: ignore[type-arg, assignment]
    monkeypatch.setattr(workers.WorkerPool, "run", run)
    data = unlabelled(many(tmp_path / "data"), world)
    with pytest.raises(TrainingFailed, match=r"worker 0 \(process \d+\) ended with code -9"):
        predict_files(served, data, tmp_path / "out", workers=2, batch_size=4)
    assert killed and [path.name for path in tmp_path.iterdir()] == ["data"]
