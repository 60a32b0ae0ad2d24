"""`Job`: the user's command line, and how it is changed for a run under faults.

The job takes `--checkpoint-dir DIR`, `--ranks N` and `--set KEY=VALUE`, as `rayrec train` does, and
so may a script of the user's own. `--checkpoint-dir` names the folder below which every run gets a
folder of its own. The keys `run.failure.max_failures=-1` and `run.resume_from=auto` are set where
the command does not set them, so that the run recovers from any number of faults, and goes on when
its driver is started again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.checks import is_uri
from rayrec.errors import ConfigError

FOLDER = "--checkpoint-dir"
FAILURES, RESUME = "run.failure.max_failures", "run.resume_from"
CPUS, SPARES = "scaling.cpus_per_worker", "scaling.spares"
WAIT = "scaling.placement_timeout_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Training job of the user.

    Attributes:
        words: the command as the user gave it.
        settings: what its --set say, as tables.
        cpus: CPUs of a rank, and of a spare.
    """

    words: tuple[str, ...]
    settings: Mapping[str, Any]
    folder: Path
    ranks: int
    cpus: float
    spares: int = 0

    def command(self, folder: Path, *, waits: bool = False) -> list[str]:
        """Return the command of a run that keeps its checkpoints in `folder`.

        Args:
            waits: the run waits for a node that takes the place of a lost one.
        """
        words = list(self.words)
        for at, word in enumerate(words):
            if word == FOLDER:
                words[at + 1] = str(folder)
            elif word.startswith(f"{FOLDER}="):
                words[at] = f"{FOLDER}={folder}"
        added = {FAILURES: "-1", RESUME: "auto"}
        if waits:
            added[WAIT] = "120"
        for key, value in added.items():
            if _said(self.settings, key) is None:
                words += ["--set", f"{key}={value}"]
        return words


def read_job(words: Sequence[str], settings: Mapping[str, Any], default_ranks: int) -> Job:
    """Parse the options of the job's command line that a campaign needs.

    Args:
        settings: what `set_values` say, read as `rayrec train` reads them.
    Raises:
        ConfigError: the command is not found, keeps no checkpoints on this machine, has no ranks
            to strike, or starts somewhere else than in an empty folder.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"the job's command {words[0]!r} is not found; give a command that this shell can "
            "start, such as: rayrec chaos -- python -m jobs.train_dlrm --checkpoint-dir DIR"
        )
    folder = _value(words, FOLDER)
    if not folder:
        raise ConfigError(
            f"the job has no {FOLDER}, and a run without checkpoints cannot go on after a fault; "
            f"add {FOLDER} DIR to the job's command."
        )
    if is_uri(folder):
        raise ConfigError(
            f"{FOLDER} {folder} is no folder of this machine, on which the private cluster runs; "
            "name one."
        )
    path = Path(folder).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{FOLDER} {folder} is not an empty folder; name another, since every run under faults "
            "begins anew."
        )
    ranks = _value(words, "--ranks") or _said(settings, "scaling.num_workers")
    if "--local" in words or ranks in ("0", 0):
        raise ConfigError(
            "the job runs in one process, so it has no ranks that could be killed; give it "
            "--ranks 1."
        )
    resumed = _said(settings, RESUME)
    if resumed not in (None, "auto"):
        raise ConfigError(
            f"the job has --set {RESUME}={resumed}, and every run under faults begins anew; leave "
            "it out."
        )
    return Job(
        words=tuple(words),
        settings=settings,
        folder=path,
        ranks=int(_number("--ranks", ranks, default_ranks)),
        cpus=_number(CPUS, _said(settings, CPUS), 1.0),
        spares=int(_number(SPARES, _said(settings, SPARES), 0.0)),
    )


def set_values(words: Sequence[str]) -> list[str]:
    """Return the values of all --set of a job."""
    return _values(words, "--set")


def _number(name: str, given: Any, default: float) -> float:
    if given is None:
        return default
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    # The job itself refuses other wrong values of the option.
    if not (0 < value < 1e6 or value == default):
        raise ConfigError(f"the job's {name} is {given!r}; it must be a number above 0.")
    return value


def _said(settings: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None without one."""
    found: Any = settings
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option; "" if the command ends before it, None without the option."""
    values = _values(words, option)
    return values[-1] if values else None


def _values(words: Sequence[str], option: str) -> list[str]:
    found = []
    for at, word in enumerate(words):
        if word == option:
            found.append(words[at + 1] if at + 1 < len(words) else "")
        elif word.startswith(f"{option}="):
            found.append(word.partition("=")[2])
    return found
