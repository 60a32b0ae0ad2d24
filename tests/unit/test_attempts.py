"""From where a run goes on after a failure, on a disk."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointManager
from rayrec.driver.attempts import Attempts
from rayrec.driver.rank_group import Prepared
from rayrec.driver.run_folder import held
from rayrec.driver.start import Start
from rayrec.errors import SaveError
from rayrec.train.events import Began
from rayrec.train.tasks import FitTask
from rayrec.train.world_mark import WorldMark


@dataclass(frozen=True)
class Spec:
    """What an attempt changes of a run."""

    resume_from: tuple[str, ...] = ("of the first life",)
    run_began: int | None = None
    profile: None = None
    mark: WorldMark | None = None
    steps: int = 100


def test_an_attempt_takes_the_right_to_save_from_the_one_before(tmp_path: Path) -> None:
    group: Any = SimpleNamespace(addresses=[], hosts=(), handed_over=False)
    spec: Any = Spec()
    with held(str(tmp_path / "run"), print) as folder:
        attempts = Attempts(str(tmp_path / "run"), Start(), print, None, folder)
        tasks: list[Any] = [
            attempts.prepare(lambda _: Prepared(FitTask(spec=spec, scorer=None)), group).task
            for _ in range(2)
        ]
        tasks[1].spec.mark.check()
        with pytest.raises(SaveError, match="world 2 of the run has followed world 1"):
            tasks[0].spec.mark.check()


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
