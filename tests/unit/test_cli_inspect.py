"""`rayrec inspect` on real data and a real checkpoint: its schema trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayrec.cli.main import main
from tests.clicks import write_clicks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder, rows_train=3000, rows_eval=500)
    return folder


def test_a_schema_that_finds_no_room_is_named(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(data / "train"), "--schema", "/dev/full"]) == 1
    assert "cannot write --schema to /dev/full: " in capsys.readouterr().err


def test_the_proposed_schema_trains(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.json"
    assert main(["inspect", str(data / "train"), "--label", "label", "--schema", str(schema)]) == 0
    told = capsys.readouterr().out
    assert "3,000 rows" in told and told.splitlines()[-1] == f"schema: {schema}"
    run = tmp_path / "run.toml"
    run.write_text(
        f"""
        [data]
        train = "{data}/train"
        eval = "{data}/eval"
        schema = "{schema}"
        [scaling]
        num_workers = 0
        [run]
        steps = 5
        global_batch_size = 256
        storage_path = "{tmp_path}/runs"
        evaluation = {{every_n_steps = 5, score = "auc"}}
        """
    )
    assert main(["train", str(run)]) == 0
    folder = tmp_path / "runs" / "run"
    checkpoint = folder / "step-00000005"
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "outcome          done" in told and "steps            5 of 5" in told
    assert f"{checkpoint}, the newest, the best" in told and "global_batch_size = 256" in told
    assert main(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == [5]
    assert main(["evaluate", f"{folder}@best", "--data", str(data / "eval"), "--local"]) == 0
    assert f"{checkpoint} at step 5: auc" in capsys.readouterr().out
    rows = ["--data", str(data / "eval")]
    commands = {"evaluate": rows, "predict": [*rows, "--out", "p"], "export": [f"{tmp_path}/x"]}
    for command, options in commands.items():
        assert main([command, str(folder), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"Its newest is {checkpoint}" in line and f"{folder}@best" in line
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 5 and len(found["tables"]) == 5
    assert main(["inspect", str(checkpoint)]) == 0
    assert "t_cat_0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--label", "labell"], "labell"),
        (["--rows", "0"], "--rows"),
        (["--where", "day >"], "day >"),
        (["--schema", "/proc/no/schema.json"], "--schema"),
    ],
)
def test_mistakes_are_one_line(
    data: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["inspect", str(data / "train"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_what_is_neither_data_nor_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
