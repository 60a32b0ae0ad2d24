"""`Job`: the user's command line, and how it is changed for a run under faults.

Three of its options are read or changed, which all training jobs of rayrec have, and so does a
script of the user's own that takes them. `--checkpoint-dir` names the folder below which every run
gets a folder of its own. `--max-failures -1` and `--resume auto` are added where they are missing,
so that the run recovers from any number of faults, and goes on when its driver is started again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayrec.checks import is_uri
from rayrec.errors import ConfigError

FOLDER = "--checkpoint-dir"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Training job of the user.

    Attributes:
        words: the command as the user gave it.
        folder: absolute path that --checkpoint-dir names.
        ranks: number of ranks.
        cpus: CPUs of a rank.
        spares: processes that wait beside the ranks.
    """

    words: tuple[str, ...]
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
        added = {"--max-failures": "-1", "--resume": "auto"}
        if waits:
            added["--placement-timeout"] = "120"
        for option, value in added.items():
            if _value(words, option) is None:
                words += [option, value]
        return words


def read_job(words: Sequence[str], default_ranks: int) -> Job:
    """Parse the options of the job's command line that a campaign needs.

    Args:
        default_ranks: number of ranks of a job that does not name it.
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
    if "--local" in words:
        raise ConfigError(
            "the job has --local, so it has no ranks that could be killed; give it --ranks 1."
        )
    if _value(words, "--resume") not in (None, "auto"):
        raise ConfigError(
            f"the job has --resume {_value(words, '--resume')}, and every run under faults begins "
            "anew; leave it out."
        )
    return Job(
        words=tuple(words),
        folder=path,
        ranks=int(_number(words, "--ranks", default_ranks)),
        cpus=_number(words, "--cpus-per-rank", 1.0),
        spares=int(_number(words, "--spares", 0.0)),
    )


def _number(words: Sequence[str], option: str, default: float) -> float:
    text = _value(words, option)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # The job itself refuses other wrong values of the option.
    if not (0 < value < 1e6 or value == default):
        raise ConfigError(f"the job's {option} is {text!r}; it must be a number above 0.")
    return value


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option; "" if the command ends before it, None without the option."""
    value: str | None = None
    for at, word in enumerate(words):
        if word == option:
            value = words[at + 1] if at + 1 < len(words) else ""
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
