"""From where a run goes on after a failure, on a disk."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointManager
from rayrec.driver.attempts import Attempts
from rayrec.driver.start import Start
from rayrec.train.events import Began


@dataclass(frozen=True)
class Spec:
    """What an attempt changes of a run."""

    resume_from: tuple[str, ...] = ("of the first life",)
    run_began: int | None = None
    profile: None = None
    steps: int = 100


def test_what_an_unfinished_save_left_does_not_end_a_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is ended may write on for a moment, and some disks keep what it has open."""

    def refuses(manager: CheckpointManager, after_step: int) -> tuple[int, ...]:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    told: list[str] = []
    attempts = Attempts(str(tmp_path), Start(), told.append, None)
    attempts.see(Began(step=0, path=None))
    monkeypatch.setattr(CheckpointManager, "clear_unfinished", refuses)
    spec: Any = Spec()
    assert attempts.again(spec) == (Spec(resume_from=(), run_began=0), 0)
    assert len(told) == 1 and "Directory not empty" in told[0]
