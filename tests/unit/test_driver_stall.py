"""A run that stands still says where, once per doubling of the time, and leaves its stacks in a
file.
"""

from __future__ import annotations

import stat
import tempfile
import time
from pathlib import Path

import pytest

from rayrec.driver.run_log import RunLog, StallWatch


def test_a_standstill_is_told_with_the_phase_and_the_stacks(tmp_path: Path) -> None:
    said: list[str] = []
    log = RunLog(str(tmp_path), "a")
    watch = StallWatch(said.append, log, lambda: "-- rank 0\nin a collective", stall_s=0.2)
    watch.start()
    watch.at("planning")
    standing_still(said, 2)
    watch.close()
    assert (
        "no progress for 0 s while planning; the stacks of the driver and of the ranks are in"
        in said[0]
    )
    assert log.path is not None
    text = log.path.read_text()
    assert text.count("no progress") == 2, "after the time, and after twice the time"
    assert (
        "def standing_still" not in text
        and "standing_still" in text
        and "-- rank 0\nin a collective" in text
    )


def standing_still(said: list[str], lines: int) -> None:
    deadline = time.monotonic() + 20
    while len(said) < lines and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow
def test_progress_and_patience_keep_it_quiet(tmp_path: Path) -> None:
    said: list[str] = []
    log = RunLog(str(tmp_path), "a")
    watch = StallWatch(said.append, log, lambda: "", stall_s=3.0)
    watch.start()
    for _ in range(80):
        watch.at("training")
        time.sleep(0.05)
    assert said == []
    watch.at("waiting for room", patient=True)
    standing_still(said, 1)
    watch.close()
    assert len(said) == 1 and said[0].endswith("s while waiting for room")
    assert log.path is not None and not log.path.exists(), "waiting for room has no stacks to show"


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in RunLog(str(tmp_path / "file"), "a").write("x")


def test_a_run_without_a_local_folder_logs_to_a_file_of_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users write into the folder for temporary files: what they guess may be theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = RunLog("s3://bucket/run", "clicks"), RunLog("s3://bucket/run", "clicks")
    paths = [Path(log.write(text)) for log, text in ((one, "a"), (other, "b"), (one, "c"))]
    assert paths[0] == paths[2] != paths[1] and len(list(tmp_path.iterdir())) == 2
    assert all(path.name.startswith("rayrec-clicks-") for path in paths)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert [line.split("] ")[1] for line in paths[0].read_text().splitlines()] == ["a", "c"]


def test_no_room_for_a_temporary_file_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    assert "/no/such/folder cannot be written" in RunLog(None).write("x")
