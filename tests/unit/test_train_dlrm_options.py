"""The command line of jobs.train_dlrm takes what its users know by name."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from jobs import train_two_tower
from jobs.settings import run_of
from jobs.train_dlrm import main, parse
from rayrec.driver import RunConfig
from rayrec.errors import ConfigError, InputError
from rayrec.optim import SPARSE_OPTIMIZERS, ScheduleConfig
from rayrec.recipe import MODELS, ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.runs.reporting import seconds_by_part, timing_table
from rayrec.runs.run_file import RunFile
from rayrec.train.events import Milestone
from rayrec.train.optimizer_config import DEFAULT_SPARSE


def test_every_option_reads_into_its_value() -> None:
    words = "--train a --eval b --schema c --model dcn --ranks 3 --plan row_wise"
    words += " --global-batch-size 8 --steps 5 --epochs 2 --sparse-lr 0.5"
    words += " --dense-lr 0.25 --optimizer adam --seed 7 --checkpoint-dir d --result e"
    args = parse(words.split())
    assert (args.train, args.eval, args.schema, args.model, args.ranks, args.plan) == (
        "a",
        "b",
        "c",
        "dcn",
        3,
        "row_wise",
    )
    assert (args.global_batch_size, args.steps, args.epochs, args.sparse_lr, args.dense_lr) == (
        8,
        5,
        2,
        0.5,
        0.25,
    )
    assert (args.optimizer, args.seed, args.checkpoint_dir, args.result) == ("adam", 7, "d", "e")
    assert parse(["--global-batch", "9"]).global_batch_size == 9


def test_schedules_and_initial_values_have_words() -> None:
    run = run_of(parse(["--schedule", "linear", "--warmup", "5"]), epochs=1, extras={})
    said = ScheduleConfig(decay="linear", warmup=5)
    assert run.sparse_schedule == run.dense_schedule == said
    assert run_of(parse([]), epochs=1, extras={}).sparse_schedule == ()
    assert parse(["--init-bound", "0.5"]).init_bound == 0.5


def test_the_job_a_run_file_and_a_config_have_one_set_of_defaults() -> None:
    args, file = parse([]), RunFile.read(None)
    run = run_of(args, epochs=1, extras={})
    assert run == replace(file.run, checkpoint=run.checkpoint)
    assert run == replace(RunConfig(global_batch_size=1024, epochs=1), checkpoint=run.checkpoint)
    recipe = ModelRecipe(model="dcn", schema="")
    assert args.init_bound == file.model.init_bound == recipe.init_bound


@pytest.mark.parametrize("word", SPARSE_OPTIMIZERS)
def test_the_name_of_an_optimizer_alone_means_the_same_everywhere(word: str) -> None:
    said = RunConfig(global_batch_size=1, steps=1, sparse_optimizer=word).sparse_optimizer
    assert run_of(parse(["--optimizer", word]), epochs=1, extras={}).sparse_optimizer == said
    for change in (f"run.sparse_optimizer={word}", f"run.sparse_optimizer.name={word}"):
        assert RunFile.read(None, [change]).run.sparse_optimizer == said
    towers = run_of(train_two_tower.parse(["--optimizer", word]), epochs=1, extras={})
    own = 0.05 if said.lr == DEFAULT_SPARSE.lr else said.lr
    assert towers.sparse_optimizer == replace(said, lr=own)
    given = run_of(parse(["--optimizer", word, "--sparse-lr", "0.5"]), epochs=1, extras={})
    assert given.sparse_optimizer == replace(said, lr=0.5)


@pytest.mark.parametrize(
    ("option", "names"), [("--optimizer", SPARSE_OPTIMIZERS), ("--model", MODELS)]
)
def test_every_name_is_taken_and_others_are_not(
    option: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names:
        parse([option, name])
    with pytest.raises(SystemExit):
        parse([option, "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


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
    files = ["--train", f"{tmp_path}/train", "--eval", f"{tmp_path}/eval"]
    return [*files, "--schema", f"{tmp_path}/schema.json", "--local", "--steps", "1"]


def test_a_damaged_truth_is_found_before_training(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "truth.json").write_text('{"rows": 50}')
    with pytest.raises(ConfigError, match=r"truth\.json"):
        main(given)
    assert "step 1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--ranks", "1"], "--ranks is about the ranks of a cluster"),
        (["--pin-cores"], "--pin-cores is about the ranks of a cluster"),
        (["--epochs", "1"], "--steps contradicts --epochs"),
        (["--keep", "1"], "--keep has no effect without --checkpoint-dir"),
        (["--checkpoint-every", "1"], "--checkpoint-every has no effect without"),
        (["--checkpoint-every-s", "60"], "--checkpoint-every-s has no effect without"),
        (["--checkpoint-async"], "--checkpoint-async has no effect without --checkpoint-dir"),
        (
            ["--checkpoint-incremental"],
            "--checkpoint-incremental has no effect without --checkpoint-dir",
        ),
        (
            ["--checkpoint-full-every", "3", "--checkpoint-dir", "a/b"],
            "--checkpoint-full-every has no effect without --checkpoint-incremental",
        ),
        (
            ["--checkpoint-every", "1", "--checkpoint-every-s", "60", "--checkpoint-dir", "a/b"],
            "--checkpoint-every contradicts --checkpoint-every-s",
        ),
        (["--new-data"], "--new-data has no effect without --resume"),
        (["--init-optimizer"], "--init-optimizer has no effect without --init-from"),
        (["--profile-skip", "5"], "--profile-skip has no effect without --profile"),
        (["--resume", "latest"], "--resume latest looks .* in --checkpoint-dir"),
        (["--resume", "a", "--init-from", "b"], "--resume contradicts --init-from"),
    ],
)
def test_an_option_without_effect_is_refused(given: list[str], more: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main([*given, *more])


def test_a_result_is_not_written_over_what_is_read(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--result .* over the file of --schema"):
        main([*given, "--result", f"{tmp_path}/train/../schema.json"])
    assert json.loads((tmp_path / "schema.json").read_text()) == SCHEMA


def test_files_of_two_kinds_are_no_data_set(given: list[str], tmp_path: Path) -> None:
    rows = pq.read_table(tmp_path / "train")
    pa.feather.write_feather(rows, tmp_path / "train" / "_left_out.arrow")
    assert open_data(f"{tmp_path}/train", json.dumps(SCHEMA)).num_rows == 50
    pa.feather.write_feather(rows, tmp_path / "train" / "more.arrow")
    with pytest.raises(InputError, match=r"such as part\.parquet and more\.arrow"):
        open_data(f"{tmp_path}/train", json.dumps(SCHEMA))
