"""`python -m benchmarks.gpu` on a CPU: parts pass, faults make them fail, none hides another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checks, parts, trace
from benchmarks.gpu.checks import FAIL, PASS, SKIPPED, Notes, Settings, Skip
from benchmarks.gpu.reference import Reference
from rayrec.optim import SGD

ROOT = Path(__file__).parents[2]
TINY = Settings(size="tiny")


@pytest.mark.parametrize("name", ["machine", "cached", "attention", "bandwidth", "torchrec"])
def test_a_part_runs_on_the_cpu(name: str) -> None:
    result = parts.run_here(name, TINY, Notes())
    bad = [check for check in result["checks"] if check["status"] == FAIL]
    assert not bad and result["status"] in (PASS, SKIPPED)
    assert result["status"] == PASS or name == "torchrec"
    assert json.dumps(result) and parts.summary(result)


def test_a_wrong_update_makes_a_part_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = SGD.formula

    def slower(o, lr, *rest):
        formula(o, 0.9 * lr, *rest)

    monkeypatch.setattr(SGD, "formula", slower)
    from benchmarks.gpu.models import compare_training, trained_case

    case = trained_case(30)
    with pytest.raises(checks.Differs, match=r"output of step 1: \d+ of \d+ values differ"):
        compare_training(case, SGD(lr=0.1), TINY)
    monkeypatch.undo()
    assert compare_training(case, SGD(lr=0.1), TINY)["rows"] < 1e-5


def test_the_reference_trains_by_the_formula() -> None:
    from benchmarks.gpu.models import cases

    case = cases(20)[0]
    reference = Reference(case, SGD(lr=0.5), 0)
    kjt, before = case.batch(4, 3, 1), reference.weights["p0"].clone()
    output = reference.forward(kjt)
    reference.step(kjt, torch.ones_like(output))
    counts = torch.bincount(kjt["a"].values(), minlength=20)
    wanted = before - 0.5 * counts[:, None]
    torch.testing.assert_close(reference.weights["p0"], wanted.double(), rtol=0, atol=1e-6)


def test_checks_are_kept_whatever_becomes_of_them(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "part.json")
    with notes.check("good") as found:
        found["number"] = 3
    with notes.check("not here"):
        raise Skip("no reason")
    assert notes.result()["status"] == PASS
    with notes.check("bad"):
        raise ValueError("first line\nsecond")
    read = json.loads((tmp_path / "part.json").read_text())
    assert read == notes.result() and read["status"] == FAIL
    assert [check["status"] for check in read["checks"]] == [PASS, SKIPPED, FAIL]
    assert read["checks"][0]["number"] == 3
    assert read["checks"][2]["detail"].startswith("ValueError: first line (test_gpu_benchmark.py:")


DIES = """
import os, sys
from pathlib import Path
from benchmarks.gpu.checks import Notes
notes = Notes(Path(sys.argv[1]))
with notes.check("first"):
    pass
with notes.check("second"):
    sys.stderr.write("a last word\\n")
    sys.stderr.flush()
    os._exit(7)
"""


def test_a_part_that_dies_leaves_what_it_found(tmp_path: Path) -> None:
    into = tmp_path / "part.json"
    result = parts.watch([sys.executable, "-c", DIES, str(into)], into, 60)
    assert result["status"] == FAIL and result["ended"] == "ended with code 7: a last word"
    found = [(check["name"], check["status"], check["detail"]) for check in result["checks"]]
    assert found == [("first", PASS, ""), ("second", FAIL, "died here")]


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    result = parts.watch(hangs, tmp_path / "part.json", 0.5)
    assert result["status"] == FAIL and result["ended"] == "not done in 0 s"
    assert parts.summary(result) == "not done in 0 s"


def test_comparisons_see_what_differs() -> None:
    a = torch.tensor([1.0, 2.0])
    assert checks.assert_close("x", a, a + 1e-6, 1e-4, 0.0) == pytest.approx(1e-6, rel=0.2)
    for wrong in (torch.tensor([1.0, 2.1]), torch.tensor([1.0, float("nan")]), torch.ones(3)):
        with pytest.raises(checks.Differs, match="x"):
            checks.assert_close("x", wrong, a, 1e-4, 0.0)
    with pytest.raises(checks.Differs, match="1 of 2 values"):
        checks.assert_equal("x", torch.tensor([1.0, 2.0000002]), a)


def test_overlaps_are_counted_beside_the_busiest_stream() -> None:
    def event(cat: str, stream: int, start: float, end: float, name: str = "k") -> dict:
        span = {"ts": start, "dur": end - start}
        return {"cat": cat, "name": name, "args": {"stream": stream}} | span

    copy = "Memcpy HtoD (Pinned -> Device)"
    found = trace.overlaps_of(
        [
            event("kernel", 7, 0, 4000),
            event("kernel", 7, 4000, 5000),
            event("kernel", 7, 8000, 10000),
            event("gpu_memcpy", 20, 4500, 8500, copy),
            event("kernel", 24, 6000, 7000),
            event("kernel", 24, 9500, 11000),
        ]
    )
    assert found == trace.Overlap(7.0, 4.0, 1.0, 2.5, 0.5, 2, 5)
    assert trace.overlaps_of([]).other_streams == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nothing"], "no part 'nothing'; there are machine, collections"),
        (["--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_a_wrong_command_ends_with_code_2(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


def run_all(tmp_path: Path, *more: str, without: tuple[str, ...] = ()) -> dict:
    """The command in a process of its own, where some packages cannot be imported."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({without!r}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    out = tmp_path / "gpu.json"
    start = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--size", "tiny"]
    done = subprocess.run(
        [*start, "--out", str(out), *more],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_all_parts_run_on_the_cpu(tmp_path: Path) -> None:
    found = run_all(tmp_path)
    assert list(found["parts"]) == list(parts.PARTS)
    assert {result["status"] for result in found["parts"].values()} <= {PASS, SKIPPED}


@pytest.mark.slow
def test_parts_run_without_ray_and_without_arrow(tmp_path: Path) -> None:
    absent = ("ray", "pyarrow", "torchrec")
    found = run_all(tmp_path, "--skip", "dlrm", "optimizers", without=absent)
    importable = found["parts"]["machine"]["figures"]["machine"]["importable"]
    assert not any(importable.values())
    assert "pyarrow is not importable" in found["parts"]["checkpoints"]["checks"][0]["detail"]
    assert found["parts"]["checkpoints"]["status"] == SKIPPED
    assert found["parts"]["pipeline"]["status"] == found["parts"]["plans"]["status"] == PASS
