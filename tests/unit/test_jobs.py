"""The training jobs are `rayrec train` with run files of their own, and keys mean what the configs
mean.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from jobs import train_dlrm, train_two_tower
from jobs.train_dlrm import main
from rayrec.command import run_command
from rayrec.driver import RunConfig
from rayrec.errors import ConfigError, InputError
from rayrec.optim import SPARSE_OPTIMIZERS
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.runs.reporting import seconds_by_part, timing_table
from rayrec.runs.run_file import RunFile
from rayrec.train.events import Milestone
from tests.words import sets


@pytest.mark.parametrize("job", [train_dlrm, train_two_tower])
def test_a_job_is_the_command_with_a_run_file_of_its_own(
    job: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--local", *sets("run.seed=7", "run.steps=3"), "--print-config"]
    assert job.main(words) == 0
    own = tmp_path / "own.toml"
    own.write_text(capsys.readouterr().out)
    run = RunFile.read(job.RUN_FILE, ["run.seed=7", "run.steps=3", "scaling.num_workers=0"])
    assert RunFile.read(str(own)) == replace(run, source=str(own))
    own.write_text("[run]\nglobal_batch_size = 17\n")
    assert job.main([str(own), "--print-config"]) == 0
    assert capsys.readouterr().out == RunFile.read(str(own)).to_toml()


def test_rows_that_are_named_take_the_place_of_planted_ones(given: list[str]) -> None:
    planted = RunFile.read(train_dlrm.RUN_FILE).data.planted
    assert planted is not None and (planted.rows_train, planted.rows_eval) == (1_500_000, 100_000)
    named = RunFile.read(train_dlrm.RUN_FILE, [word for word in given if word[:4] == "data"]).data
    assert named.planted is None and named.train is not None


def test_a_run_file_and_a_config_have_one_set_of_defaults() -> None:
    file = RunFile.read(None)
    assert file.run == RunConfig(global_batch_size=1024, epochs=1)
    assert file.model == ModelRecipe(model="dlrm", schema="")


@pytest.mark.parametrize("word", SPARSE_OPTIMIZERS)
def test_the_name_of_an_optimizer_alone_means_the_same_everywhere(word: str) -> None:
    said = RunConfig(global_batch_size=1, steps=1, sparse_optimizer=word).sparse_optimizer
    for change in (f"run.sparse_optimizer={word}", f"run.sparse_optimizer.name={word}"):
        assert RunFile.read(None, [change]).run.sparse_optimizer == said


def test_a_start_up_is_told_by_part() -> None:
    timing = [
        Milestone("process", 10.0),
        Milestone("plan", 13.5),
        Milestone("imports", 11.0),
        Milestone("first step", 14.0),
    ]
    assert seconds_by_part(timing) == {"imports": 1.0, "plan": 2.5, "first step": 0.5}
    assert "to the first step          4.00 s" in timing_table(timing).splitlines()[-1]
    before = time.time()
    words = "from rayrec.runs.reporting import process_start; print(process_start())"
    told = subprocess.run([sys.executable, "-c", words], stdout=subprocess.PIPE, check=True)
    # the kernel tells the moment of its own start in whole seconds
    assert before - 2 < float(told.stdout) < time.time() + 2


SCHEMA = {
    "label": "y",
    "dense": ["d"],
    "features": [{"name": "f", "column": "f"}],
    "tables": [{"name": "t", "num_embeddings": 10, "embedding_dim": 4, "features": ["f"]}],
}


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Options of a run on 50 rows in this process."""
    rows = pa.table({"y": [0, 1] * 25, "d": [0.5] * 50, "f": list(range(10)) * 5})
    for part in ("train", "eval"):
        (tmp_path / part).mkdir()
        pq.write_table(rows, tmp_path / part / "part.parquet")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    rows = [f"data.{name}={tmp_path}/{name}" for name in ("train", "eval")]
    return ["--local", *sets(*rows, f"data.schema={tmp_path}/schema.json", "run.steps=1")]


def test_a_damaged_truth_is_found_before_training(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "truth.json").write_text('{"rows": 50}')
    with pytest.raises(ConfigError, match=r"truth\.json"):
        main(given)
    assert "step 1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("scaling.pin_cores=true", "pin_cores is about ranks on a cluster"),
        ("run.epochs=1", "steps=1 and epochs=1"),
        ("run.checkpoint.every_n_steps=1", "that has no storage; give run.storage_path"),
        ("run.profile.skip_steps=5", "needs path"),
        ("run.resume_from=latest", "'latest' needs run.storage_path"),
        ("run.publish.dtype=int8", "give exactly one of them"),
    ],
)
def test_a_key_without_effect_is_refused(given: list[str], changes: str, words: str) -> None:
    """Whatever the configs refuse (test_driver_config.py) is refused as a key of a run file."""
    with pytest.raises(ConfigError, match=words):
        main([*given, *sets(changes)])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--plan", "rowwise"], "plan 'rowwise' is neither a file"),
        (sets("scaling.spares=1"), "recovers from nothing needs no spares"),
        (["--ranks", "0:2"], "num_workers"),
    ],
)
def test_a_run_that_cannot_be_costs_no_rows(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        main(more)
    except ConfigError as error:
        assert words in str(error)
    said = capsys.readouterr()
    assert "making" not in said.out


def test_a_result_is_not_written_over_what_is_read(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--result .* over the file of \[data\] schema"):
        main([*given, "--result", f"{tmp_path}/train/../schema.json"])
    assert json.loads((tmp_path / "schema.json").read_text()) == SCHEMA


def test_files_of_two_kinds_are_no_data_set(given: list[str], tmp_path: Path) -> None:
    rows = pq.read_table(tmp_path / "train")
    pa.feather.write_feather(rows, tmp_path / "train" / "_left_out.arrow")
    assert open_data(f"{tmp_path}/train", json.dumps(SCHEMA)).num_rows == 50
    pa.feather.write_feather(rows, tmp_path / "train" / "more.arrow")
    with pytest.raises(InputError, match=r"such as part\.parquet and more\.arrow"):
        open_data(f"{tmp_path}/train", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--ranks 2 --set scaling.num_workers=3", "--ranks and --set scaling.num_workers=3 say"),
        ("--set run.checkpoint.every_s=5 --set run.checkpoint={}", "takes the place of --set"),
        ("--set data.work_dir=a", "work_dir is for 'two_tower'"),
        ("--print-config --timing", "--print-config trains nothing"),
        ("--result {}/train/part.parquet", "lies in the folder of [data] train"),
        ("--rank 2", "No such option '--rank'. Did you mean '--ranks'?"),
    ],
)
def test_what_would_be_ignored_or_lost_is_refused(
    given: list[str], tmp_path: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for word in given if word != "--local"]
    where = words.format(tmp_path).split()
    assert run_command(main, [*given, *where]) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "train" / "part.parquet").stat().st_size > 500


def test_a_key_without_a_value_leaves_the_rows_of_the_file() -> None:
    planted = RunFile.read(train_dlrm.RUN_FILE, ["data.eval=none"]).data.planted
    assert planted is not None
