"""A run that stands still says where, once per doubling of the time, and leaves its stacks in a
file.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rayrec.driver.run_log import RunLog
from rayrec.driver.stall import StallWatch


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
    assert not log.path.exists(), "waiting for room has no stacks to show"


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in RunLog(str(tmp_path / "file"), "a").write("x")


def test_a_run_in_an_object_store_logs_to_a_temporary_file() -> None:
    assert RunLog("s3://bucket/run", "clicks").path.name.startswith("rayrec-clicks-")
