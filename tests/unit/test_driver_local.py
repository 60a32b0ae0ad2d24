"""A driver with one rank in this process: where runs start, what they keep, what they predict, how
they stop. No Ray.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from rayrec.checkpoint import CheckpointManager, load_table, read_manifest
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import (
    Driver,
    FailureConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    run_folder,
)
from rayrec.driver.scaling_checks import check_run
from rayrec.driver.start import Start, find_start
from rayrec.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    InputError,
    RayrecError,
    RunInterrupted,
    TrainingFailed,
)
from rayrec.optim import Adam
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train.callbacks import Callback
from rayrec.train.events import Saved
from tests.clicks import TWELVE_STEPS, write_clicks, write_spoilt
from tests.unit.local_runs import STEPS, acting, driver, small_recipe


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> SyntheticPaths:
    return write_clicks(tmp_path_factory.mktemp("clicks"), **TWELVE_STEPS)


@pytest.fixture(scope="module")
def whole(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a whole run with checkpoints at steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    result = driver(clicks, folder).fit()
    assert result.steps == STEPS and result.checkpoint == f"{folder}/run/step-00000012"
    return folder / "run"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to be spoilt or continued."""
    return Path(shutil.copytree(whole, tmp_path / "copy" / "run"))


def tables_of(checkpoint: str | Path) -> dict[str, pa.Table]:
    return {
        t.name: load_table(str(checkpoint), t.name) for t in read_manifest(str(checkpoint)).tables
    }


def damage(checkpoint: Path, at: int = -1) -> str:
    """Flip a bit in the middle, or in the footer, of a table's file; its path in the checkpoint."""
    path = read_manifest(str(checkpoint)).files[0].path
    data = bytearray((checkpoint / path).read_bytes())
    data[at if at < 0 else len(data) // 2] ^= 1
    (checkpoint / path).write_bytes(data)
    return path


@pytest.mark.parametrize("step", [4, 8, 12])
def test_a_run_goes_on_from_any_step_and_ends_as_the_whole(
    clicks: SyntheticPaths, whole: Path, copy: Path, step: int
) -> None:
    result = driver(clicks, copy.parent, resume_from=str(copy / f"step-{step:08d}")).fit()
    assert result.steps == STEPS and tables_of(result.checkpoint or "") == tables_of(
        whole / "step-00000012"
    )
    later = {f"step-{s:08d}" for s in (8, 12) if s > step}
    aside = list(copy.glob("set-aside-*"))
    assert len(aside) == (1 if later else 0)
    assert {path.name for folder in aside for path in folder.iterdir()} == later
    assert CheckpointManager(str(copy)).steps() == (4, 8, 12)


def test_auto_starts_once_and_then_continues_from_what_is_whole(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One and the same command, given again and again, comes to the tables of one whole run."""
    folder = tmp_path / "again"
    said = []
    for steps in (5, 9, STEPS, STEPS):
        result = driver(clicks, folder, steps=steps, resume_from="auto", progress="plain").fit()
        said.append(capsys.readouterr().out)
    assert "resumed" not in said[0]
    assert f"resumed from {folder}/run/step-00000005 at step 5" in said[1]
    assert "nothing is left to train" in said[3]
    assert tables_of(result.checkpoint or "") == tables_of(whole / "step-00000012")


def test_auto_takes_the_weights_of_another_run_once(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"resume_from": "auto", "init_from": str(whole / "step-00000012"), "progress": "plain"}
    driver(clicks, tmp_path / "new", steps=4, **given).fit()
    assert "started with the weights of" in capsys.readouterr().out
    damage(tmp_path / "new/run/step-00000004")
    with pytest.raises(DamagedCheckpointError):
        driver(clicks, tmp_path / "new", steps=8, **given).fit()


def test_one_rank_in_this_process_cannot_be_replaced(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"max_failures=2.*num_workers=0.*cannot be replaced"):
        driver(clicks, tmp_path / "new", failure=FailureConfig(max_failures=2)).fit()


def test_rows_on_gpus_have_no_sync_points(clicks: SyntheticPaths, tmp_path: Path) -> None:
    """Found before anything starts: this machine has no GPU."""
    failure = FailureConfig(max_failures=2, sync_every_n_steps=50)
    given = {"failure": failure, "storage_path": str(tmp_path)}
    run = RunConfig(global_batch_size=256, steps=2, **given)
    with pytest.raises(ConfigError, match=r"sync_every_n_steps=50.*use_gpu=True"):
        check_run(run, ScalingConfig(num_workers=2, use_gpu=True))


@pytest.mark.parametrize("at", [0, -1])
def test_latest_passes_over_what_is_damaged_and_says_so(
    clicks: SyntheticPaths, whole: Path, copy: Path, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage in the middle of the rows is found while ranks restore, after half of the tables were
    filled.
    """
    path = damage(copy / "step-00000012", at)
    result = driver(clicks, copy.parent, resume_from="latest", progress="plain").fit()
    said = capsys.readouterr().out
    assert (
        f"passed over {copy}/step-00000012, which is damaged: {copy}/step-00000012/{path}" in said
    )
    assert f"resumed from {copy}/step-00000008 at step 8" in said and "set aside" in said
    assert tables_of(result.checkpoint or "") == tables_of(whole / "step-00000012")


def test_latest_passes_over_a_damaged_manifest_and_missing_files(
    clicks: SyntheticPaths, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "step-00000012" / "manifest.json").write_text("{")
    os.remove(copy / "step-00000008" / read_manifest(str(copy / "step-00000008")).files[0].path)
    driver(clicks, copy.parent, resume_from="latest", progress="plain").fit()
    said = capsys.readouterr().out
    assert said.count("passed over") == 2 and f"resumed from {copy}/step-00000004 at step 4" in said


def test_latest_passes_over_a_newer_checkpoint_of_another_run(
    clicks: SyntheticPaths, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = OptimizerConfig(name="sgd", lr=0.1)
    driver(clicks, tmp_path / "other", steps=4, sparse_optimizer=other).fit()
    shutil.copytree(tmp_path / "other/run/step-00000004", copy / "step-00000016")
    driver(clicks, copy.parent, resume_from="latest", steps=13, progress="plain").fit()
    said = capsys.readouterr().out
    assert f"passed over {copy}/step-00000016, which does not fit this run: " in said
    assert f"resumed from {copy}/step-00000012 at step 12" in said and "set aside" in said


def test_a_change_of_what_the_run_is_told_does_not_go_back_to_older_checkpoints(
    clicks: SyntheticPaths, copy: Path
) -> None:
    with pytest.raises(ConfigError, match=r"step-00000012.*global_batch_size=128"):
        driver(clicks, copy.parent, resume_from="latest", steps=13, global_batch_size=64).fit()


def test_nothing_whole_is_an_error_that_names_the_damage(
    clicks: SyntheticPaths, copy: Path
) -> None:
    for step in (4, 8, 12):
        path = damage(copy / f"step-{step:08d}", 0)
    with pytest.raises(CheckpointError, match=rf"step-00000004/{path} is damaged"):
        driver(clicks, copy.parent, resume_from="latest").fit()
    assert sorted(p.name for p in copy.glob("s*")) == [
        "step-00000004",
        "step-00000008",
        "step-00000012",
    ]


def test_other_data_are_refused_unless_they_are_meant(
    clicks: SyntheticPaths, copy: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(clicks.train, tmp_path / "other"))
    (part,) = other.glob("*.parquet")
    pq.write_table(pq.read_table(part).slice(0, 1100), part)
    options: dict[str, Any] = {
        "resume_from": str(copy / "step-00000008"),
        "train": other,
        "global_batch_size": 100,
    }
    with pytest.raises(ConfigError, match=r"trained with global_batch_size=128, the run has 100"):
        driver(clicks, copy.parent, **options).fit()
    options["global_batch_size"] = 128
    with pytest.raises(ConfigError, match=r"trained on other data.*new_data"):
        driver(clicks, copy.parent, **options).fit()
    assert not list(copy.glob("set-aside-*")), "a refused run leaves everything as it was"
    result = driver(clicks, copy.parent, **options, new_data=True, steps=None, epochs=1).fit()
    assert result.steps == 8 + math.ceil(1100 / 128) and result.rows == 1100
    assert read_manifest(result.checkpoint or "").cursor["batch"] == 9


def test_the_same_data_elsewhere_are_the_same_data(
    clicks: SyntheticPaths, copy: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(clicks.train, tmp_path / "moved"))
    assert driver(clicks, copy.parent, resume_from="latest", train=moved).fit().steps == STEPS


def test_a_warm_start_takes_weights_and_begins_at_step_0(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path
) -> None:
    """Another batch size, seed and optimizer: untrained, so that the weights can be compared with
    the source's.
    """
    options: dict[str, Any] = {
        "init_from": str(whole / "step-00000008"),
        "global_batch_size": 100,
        "seed": 7,
        "sparse_optimizer": OptimizerConfig(name="sgd", lr=0.0),
        "dense_optimizer": OptimizerConfig(name="sgd", lr=0.0),
    }
    result = driver(clicks, tmp_path, steps=2, **options).fit()
    assert result.steps == 2 and result.rows == 200
    source, warm = tables_of(whole / "step-00000008"), tables_of(result.checkpoint or "")
    assert {name: t["weight"] for name, t in source.items()} == {
        name: t["weight"] for name, t in warm.items()
    }
    assert read_manifest(result.checkpoint or "").cursor["seed"] == 7


def test_optimizer_state_is_taken_only_when_asked(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path
) -> None:
    frozen: dict[str, Any] = {
        "sparse_optimizer": OptimizerConfig(name="rowwise_adagrad", lr=0.0),
        "steps": 1,
    }
    source = tables_of(whole / "step-00000012")
    for asked in (False, True):
        start = {"init_from": str(whole / "step-00000012"), "init_optimizer_state": asked}
        result = driver(clicks, tmp_path / str(asked), **frozen, **start).fit()
        after = tables_of(result.checkpoint or "")
        name = max(source, key=lambda table: source[table].num_rows)
        (state,) = (
            column for column in source[name].column_names if column not in ("row", "weight")
        )
        grown = [
            a - b
            for a, b in zip(
                after[name][state].to_pylist(), source[name][state].to_pylist(), strict=True
            )
        ]
        assert (min(grown) >= 0) is asked
    with pytest.raises(CheckpointError, match=r"trained with 'rowwise_adagrad', 'sgd' is wanted"):
        sgd = OptimizerConfig(name="sgd", lr=0.1)
        driver(
            clicks,
            tmp_path / "sgd",
            init_from=str(whole / "step-00000012"),
            init_optimizer_state=True,
            sparse_optimizer=sgd,
        ).fit()


def test_optimizers_train_are_saved_and_resume_with_their_options(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "sparse_optimizer": Adam(lr=0.01, beta2=0.9, weight_decay=0.1),
        "dense_optimizer": OptimizerConfig(name="adam", lr=0.01, options={"betas": (0.5, 0.9)}),
    }
    whole, first = (driver(clicks, tmp_path / f, steps=s, **given) for f, s in (("a", 6), ("b", 4)))
    wanted, cut = whole.fit().checkpoint or "", first.fit().checkpoint or ""
    saved = read_manifest(cut)
    assert all(
        o == {"name": "adam", **given["sparse_optimizer"].hyperparameters}
        for o in saved.optimizers.values()
    )
    # also a manifest that says no more than name and learning rate
    short = replace(
        saved, optimizers={name: {"name": "adam", "lr": 0.01} for name in saved.optimizers}
    )
    for folder, manifest in (("c", saved), ("d", short)):
        copy = shutil.copytree(Path(cut).parent, tmp_path / folder / "run") / Path(cut).name
        (copy / "manifest.json").write_bytes(manifest.to_bytes())
        again = driver(clicks, tmp_path / folder, steps=6, resume_from="latest", **given).fit()
        got, want = tables_of(again.checkpoint or ""), tables_of(wanted)
        assert all(got[name].equals(want[name]) for name in want)
    others = given | {"sparse_optimizer": Adam(lr=0.01)}
    plain = driver(clicks, tmp_path / "e", steps=6, **others).fit().checkpoint or ""
    assert any(not tables_of(plain)[name].equals(t) for name, t in tables_of(wanted).items())


def test_a_run_whose_tables_have_their_own_optimizers_resumes(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    own = {"table_optimizers": {"t_cat_0": OptimizerConfig(name="sgd", lr=0.3)}}
    wanted = tables_of(driver(clicks, tmp_path / "whole", steps=6, **own).fit().checkpoint or "")
    cut = Path(driver(clicks, tmp_path / "cut", steps=4, **own).fit().checkpoint or "")
    for said in ("auto", "latest", "run/" + cut.name):
        folder = Path(shutil.copytree(cut.parent, tmp_path / said[:4] / "run")).parent
        start = str(folder / said) if "/" in said else said
        again = driver(clicks, folder, steps=6, resume_from=start, **own).fit()
        assert tables_of(again.checkpoint or "") == wanted
    with pytest.raises(CheckpointError, match=r"'t_cat_0' .*'sgd', 'rowwise_adagrad' is wanted"):
        driver(clicks, tmp_path / "cut", steps=6, resume_from="latest").fit()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"resume_from": "NOWHERE"}, "has no file manifest.json"),
        ({"init_from": "NOWHERE"}, "has no file manifest.json"),
        ({"resume_from": "WHOLE", "seed": 9}, "trained with seed=0, the run has 9"),
        (
            {"resume_from": "WHOLE", "shuffle": False},
            "trained with shuffle=True, the run has False",
        ),
        (
            {"resume_from": "WHOLE", "dense_optimizer": OptimizerConfig(name="sgd", lr=0.1)},
            "dense optimizer 'adam', the run wants 'sgd'",
        ),
        (
            {"resume_from": "WHOLE", "sparse_optimizer": OptimizerConfig(name="adam", lr=0.1)},
            "'rowwise_adagrad', 'adam' is wanted",
        ),
    ],
)
def test_what_a_manifest_tells_is_refused_before_a_model_is_made(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    paths = {"NOWHERE": str(tmp_path / "nowhere"), "WHOLE": str(whole / "step-00000008")}
    given = {
        name: paths.get(value, value) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises((CheckpointError, ConfigError), match=says):
        driver(clicks, **given).fit()


def test_a_checkpoint_of_another_model_is_refused(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path
) -> None:
    schema = json.loads(clicks.schema.read_text())
    schema["tables"][0]["num_embeddings"] += 1
    wider = small_recipe(json.dumps(schema))
    with pytest.raises(CheckpointError, match=r"is \d+ x 4 in .* and \d+ x 4 in the model"):
        driver(clicks, model=wider, resume_from=str(whole / "step-00000008")).fit()


def test_predictions_are_rows_in_file_order_and_agree_with_the_scores(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path
) -> None:
    schema = clicks.schema.read_text()
    table = pq.read_table(clicks.eval)
    table = table.append_column("key", pa.array([f"k{i}" for i in range(table.num_rows)]))
    (tmp_path / "eval").mkdir()
    pq.write_table(table.slice(0, 200), tmp_path / "eval" / "a.parquet", row_group_size=70)
    pq.write_table(table.slice(200), tmp_path / "eval" / "b.parquet", row_group_size=90)
    out = tmp_path / "scores.parquet"
    data = open_data(str(tmp_path / "eval"), schema)
    scores = driver(clicks).evaluate(
        str(whole / "step-00000012"), data, predictions=str(out), keys=["key"]
    )
    rows = pq.read_table(out)
    assert rows.column_names == ["score", "label", "file", "row", "key"]
    assert (
        rows["key"].to_pylist() == table["key"].to_pylist()
        and rows["label"].to_pylist() == table["label"].to_pylist()
    )
    assert rows["row"].to_pylist() == [*range(200), *range(301)]
    assert [Path(name).name for name in rows["file"].to_pylist()] == ["a.parquet"] * 200 + [
        "b.parquet"
    ] * 301
    losses = [
        -math.log(score if label else 1 - score)
        for score, label in zip(rows["score"].to_pylist(), rows["label"].to_pylist(), strict=True)
    ]
    assert sum(losses) / len(losses) == pytest.approx(scores["logloss"], abs=1e-5)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["nokey"], "'nokey' is missing"),
        (["score"], "'score' is a column of every"),
        (["d_0", "d_0"], "named twice"),
    ],
)
def test_keys_are_checked_before_anything_is_scored(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path, keys: list[str], says: str
) -> None:
    with pytest.raises((ConfigError, InputError), match=says):
        driver(clicks).evaluate(
            str(whole / "step-00000012"), predictions=str(tmp_path / "p.parquet"), keys=keys
        )
    assert not list(tmp_path.iterdir())


def test_predictions_do_not_go_among_the_data(clicks: SyntheticPaths, whole: Path) -> None:
    (file,) = clicks.eval.iterdir()
    before = file.read_bytes()
    for target in (clicks.eval / "scores.parquet", file):
        with pytest.raises(ConfigError, match=r"predictions would be written to"):
            driver(clicks).evaluate(str(whole / "step-00000012"), predictions=str(target))
    assert file.read_bytes() == before and list(clicks.eval.iterdir()) == [file]


def test_memory_that_does_not_suffice_is_a_failed_run(clicks: SyntheticPaths) -> None:
    huge = ModelRecipe(model="dlrm", schema=clicks.schema.read_text(), over_layers=(10**6, 10**8))
    with pytest.raises(TrainingFailed, match=r"memory of this machine did not suffice.*400"):
        driver(clicks, model=huge).fit()


def test_more_threads_than_processors_are_refused(clicks: SyntheticPaths) -> None:
    scaling = ScalingConfig(num_workers=0, cpus_per_worker=1_000_000)
    run = RunConfig(global_batch_size=128, steps=2, progress="off")
    data = open_data(str(clicks.train), clicks.schema.read_text())
    recipe = ModelRecipe(model="dlrm", schema=clicks.schema.read_text())
    with pytest.raises(ConfigError, match=r"cpus_per_worker=1e\+06.*processors"):
        Driver(recipe, data, scaling, run).fit()


def test_a_bad_row_leaves_no_half_file_of_predictions(
    clicks: SyntheticPaths, whole: Path, tmp_path: Path
) -> None:
    write_spoilt(clicks.eval, tmp_path / "eval.parquet", "label", 450, 2, statistics=False)
    data = open_data(str(tmp_path / "eval.parquet"), clicks.schema.read_text())
    with pytest.raises(InputError, match=r"'label' holds 2 in row 450"):
        driver(clicks).evaluate(
            str(whole / "step-00000012"), data, predictions=str(tmp_path / "out" / "p.parquet")
        )
    assert not (tmp_path / "out").exists()
    driver(clicks).evaluate(
        str(whole / "step-00000012"), predictions=str(tmp_path / "out" / "p.parquet")
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["p.parquet"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_raises(
    clicks: SyntheticPaths, tmp_path: Path, number: signal.Signals
) -> None:
    model = acting(clicks, 5, lambda: os.kill(os.getpid(), number))
    kept = signal.getsignal(number)
    with pytest.raises(RunInterrupted) as stopped:
        driver(clicks, tmp_path, model=model, steps=100_000, report_every_s=0.05).fit()
    result = stopped.value.result
    assert stopped.value.code == 128 + number and result.stopped and 5 <= result.steps < 100_000
    assert read_manifest(result.checkpoint).step == result.steps
    assert signal.getsignal(number) is kept


def test_request_stop_returns_a_result(clicks: SyntheticPaths, tmp_path: Path) -> None:
    endless = driver(clicks, tmp_path, steps=100_000, report_every_s=0.05)
    timer = threading.Timer(0.5, endless.request_stop)
    timer.start()
    result = endless.fit()
    timer.join()
    assert result.stopped and result.checkpoint is not None and result.metrics == {}


def test_a_stop_before_the_ranks_begin_is_obeyed_and_one_of_an_earlier_run_is_not(
    clicks: SyntheticPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = driver(clicks, tmp_path, steps=100_000, report_every_s=0.05)

    def looks(*given: Any) -> Start:
        # where a run starts may take a while to find out
        endless.request_stop()
        return find_start(*given)

    monkeypatch.setattr("rayrec.driver.fitting.find_start", looks)
    assert endless.fit().stopped
    monkeypatch.undo()
    short = driver(clicks, steps=2)
    short.request_stop()
    assert not short.fit().stopped


def test_a_folder_of_another_run_is_not_written_to(
    clicks: SyntheticPaths, copy: Path, whole: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"already holds checkpoints.*step-00000012.*resume_from='latest'"
    ):
        driver(clicks, copy.parent).fit()
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        driver(clicks, copy.parent, init_from=str(whole / "step-00000008")).fit()
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        driver(clicks, copy.parent, resume_from=str(whole / "step-00000008")).fit()


def test_a_run_whose_folder_another_driver_has_taken_over_ends(
    clicks: SyntheticPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver elsewhere had not heard of this one for long, as of a machine that was asleep."""
    monkeypatch.setattr(run_folder, "BEAT_S", 0.05)

    class Thief(Callback):
        def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
            lock = tmp_path / "run" / run_folder.LOCK
            owner = json.loads(lock.read_text())
            lock.write_text(json.dumps({**owner, "token": "t", "pid": 7, "host": "h"}))
            time.sleep(0.5)

    with pytest.raises(RayrecError, match="was taken over by process 7 on h"):
        driver(clicks, tmp_path, callbacks=(Thief(),)).fit()
    # where the first save is slow, it is told of when the second one begins
    assert CheckpointManager(str(tmp_path / "run")).steps() in ((4,), (4, 8))


def test_a_storage_path_that_cannot_be_written_is_refused_and_nothing_is_left(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to the run's folder .*file/run"):
        driver(clicks, tmp_path / "file").fit()
    with pytest.raises(CheckpointError, match="has no file"):
        driver(clicks, tmp_path / "new", resume_from=str(tmp_path / "nowhere")).fit()
    assert not (tmp_path / "new" / "run").exists(), "a refused run leaves no empty folder"


def test_bad_evaluation_data_are_refused_before_training(
    clicks: SyntheticPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_spoilt(clicks.eval, tmp_path / "eval.parquet", "cat_0", 77, 4711)
    bad = driver(clicks, held_out=tmp_path / "eval.parquet", progress="plain")
    with pytest.raises(InputError, match=r"'cat_0' .*holds id 4711 in row 77 of '.*eval\.parquet'"):
        bad.fit()
    assert "step" not in capsys.readouterr().out


def test_evaluation_data_of_other_features_are_refused(clicks: SyntheticPaths) -> None:
    schema = json.loads(clicks.schema.read_text())
    schema["dense"] = schema["dense"][:-1]
    other = open_data(str(clicks.eval), json.dumps(schema))
    train = open_data(str(clicks.train), clicks.schema.read_text())
    with pytest.raises(
        ConfigError,
        match="number of dense columns of the training data and of the evaluation data differ: 3 "
        "and 2",
    ):
        Driver(
            nn.Module,
            train,
            ScalingConfig(num_workers=0),
            RunConfig(global_batch_size=128, steps=2),
            eval_data=other,
        )
