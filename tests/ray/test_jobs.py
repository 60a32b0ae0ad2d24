"""The jobs as a user runs them: processes of their own, with a cluster of their own, exit codes, a
result file, and nothing left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import evaluate, smoke
from rayrec.cli.main import main as cli
from rayrec.data.synthetic import SyntheticPaths
from tests.leftovers import processes_with
from tests.ray.worlds import some
from tests.words import sets

ROOT = Path(__file__).parents[2]
SMALL = sets("model.dense_layers=[16]", "model.over_layers=[16]", "run.global_batch_size=512")


def job(home: Path, name: str, *options: str, mark: str = "", **env: str) -> subprocess.Popen[str]:
    """Start a job that hears Ctrl-C, also where the test session was started in the background and
    does not.
    """
    variables = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", **env}
    if mark:
        key, _, value = mark.partition("=")
        variables[key] = value
    for key in ("RAY_ADDRESS", *(key for key in ("RAY_AUTH_MODE",) if key not in env)):
        variables.pop(key, None)
    command = [sys.executable, "-m", f"jobs.{name}", *options]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def expect_gone(mark: str, timeout_s: float = 20.0) -> None:
    """No descendant with the mark stays alive."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, [
        Path(f"/proc/{pid}/cmdline").read_bytes()[:80]
        for pid in left
        if Path(f"/proc/{pid}").exists()
    ]


@pytest.fixture
def data(clicks: SyntheticPaths) -> list[str]:
    """Options that name the data."""
    return [
        *sets(
            f"data.train={clicks.train}", f"data.eval={clicks.eval}", f"data.schema={clicks.schema}"
        )
    ]


@pytest.mark.slow
def test_train_writes_its_result_and_evaluate_agrees(
    cluster: None,
    private_home: Path,
    tmp_path: Path,
    clicks: SyntheticPaths,
    data: list[str],
    mark: str,
) -> None:
    result, checked = tmp_path / "result.json", tmp_path / "scores.json"
    train = job(
        private_home,
        "train_dlrm",
        *(*data, *SMALL, "--ranks", "2", "--plan", "row_wise"),
        *sets("run.epochs=1", "scaling.cpus_per_worker=0.5"),
        *("--checkpoint-dir", str(tmp_path / "run"), "--result", str(result)),
        mark=mark,
    )
    out, err = train.communicate(timeout=120)
    assert train.returncode == 0, err
    told = json.loads(result.read_text())
    assert (
        told["steps"] == 12
        and told["rows"] == 6007
        and told["ranks"] == 2
        and told["rows_per_s"] > 0
    )
    assert set(told["plan"].values()) == {"row_wise"} and 0 < told["train_loss"] < 1
    assert told["eval"]["regret"] == pytest.approx(told["eval"]["bayes_auc"] - told["eval"]["auc"])
    assert "bayes_auc" in out and "step 12/12" in out
    expect_gone(mark)
    words = [
        told["checkpoint"],
        "--data",
        str(clicks.eval),
        "--ranks",
        "1",
        "--result",
        str(checked),
    ]
    assert evaluate.main(words) == 0
    assert json.loads(checked.read_text())["eval"]["auc"] == pytest.approx(
        told["eval"]["auc"], abs=1e-6
    )


@pytest.mark.parametrize(
    ("number", "code", "where"),
    some(
        [
            (signal.SIGTERM, 143, ("--local",)),
            (signal.SIGINT, 130, ("--local",)),
            (signal.SIGTERM, 143, ("--ranks", "1")),
            (signal.SIGINT, 130, ("--ranks", "1")),
        ],
        [(signal.SIGTERM, 143, ("--local",))],
    ),
)
def test_a_signal_saves_and_leaves_no_process(
    private_home: Path,
    tmp_path: Path,
    data: list[str],
    mark: str,
    number: signal.Signals,
    code: int,
    where: tuple[str, ...],
) -> None:
    train = job(
        private_home,
        "train_dlrm",
        *(
            *data,
            *SMALL,
            *where,
            *sets("run.steps=1000000"),
            "--checkpoint-dir",
            str(tmp_path / "run"),
        ),
        mark=mark,
    )
    assert train.stdout is not None
    for line in train.stdout:
        if line.startswith("step "):
            break
    train.send_signal(number)
    out, err = train.communicate(timeout=60)
    assert train.returncode == code, err
    assert "stopped at step" in out and "checkpoint: " in out
    assert err.splitlines()[-1] == f"interrupted by {number.name}"
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert len(left) == 2 and left[0] == "events.jsonl" and left[1].startswith("step-")
    expect_gone(mark)


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process(private_home: Path, data: list[str], mark: str) -> None:
    """Ray's agents alone would try for a minute to tell the head, which is gone."""
    train = job(
        private_home,
        "train_dlrm",
        *(*data, *SMALL, "--ranks", "1", *sets("run.steps=1000000")),
        mark=mark,
    )
    assert train.stdout is not None
    for line in train.stdout:
        if line.startswith("step "):
            break
    train.kill()
    train.wait(10)
    expect_gone(mark, 45.0)  # without the reaper it takes a minute or more


@pytest.mark.parametrize("after", some(["", "making ", "Plan: "], ["making "]))
def test_ctrl_c_during_the_start_is_obeyed(
    private_home: Path, tmp_path: Path, after: str, mark: str
) -> None:
    """At once, while Ray starts, and while ranks start: nothing is trained, nothing is saved,
    nothing is left.
    """
    rows = sets("data.planted.rows_train=20000", "data.planted.rows_eval=1000")
    made = (*rows, *SMALL, "--ranks", "1", *sets("run.steps=1000000"))
    train = job(
        private_home, "train_dlrm", *made, "--checkpoint-dir", str(tmp_path / "run"), mark=mark
    )
    assert train.stdout is not None
    if not after:
        time.sleep(1.0)
    for line in train.stdout if after else ():
        if line.startswith(after):
            break
    train.send_signal(signal.SIGINT)
    try:
        _, err = train.communicate(timeout=60)
    finally:
        train.kill()
    # Where the interrupt meets C code that runs Python code, as some imports do, Python itself ends
    # by the signal after all is said; a shell shows 130 for that, too.
    assert train.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err and "interrupted" in err.splitlines()[-1]
    expect_gone(mark)


def test_a_users_mistake_is_one_line_and_code_2(private_home: Path) -> None:
    train = job(private_home, "train_dlrm", *sets("data.eval=/x"))
    _, err = train.communicate(timeout=60)
    assert train.returncode == 2
    assert err.startswith("error: ") and "[data] needs train" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("main", "words"), some([(cli, ["smoke"]), (smoke.main, [])], [(cli, ["smoke"])])
)
def test_smoke_passes(
    cluster: None,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], int],
    words: list[str],
) -> None:
    assert main([*words, "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("OK ") == 5 and "all_to_all among 2 ranks" in out


@pytest.mark.slow
def test_smoke_passes_with_token_authentication(tmp_path: Path, mark: str) -> None:
    process = job(
        tmp_path,
        "smoke",
        "--ranks",
        "2",
        "--cpus-per-rank",
        "0.5",
        mark=mark,
        RAY_AUTH_MODE="token",
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("OK ") == 5 and "all_to_all among 2 ranks" in out
    assert (tmp_path / ".ray" / "auth_token").exists()
    expect_gone(mark)
