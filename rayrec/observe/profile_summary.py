"""The result of a profile, as one page of text and as JSON.

It shows milliseconds by part and rank, and the largest operators. Waiting for other ranks has a row
of its own and is left out of the parts, so that parts, wait and rest add up to the step. What
threads do beside the step before stands below it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.errors import ConfigError
from rayrec.layout.units import fit, format_ms
from rayrec.observe.times import STEP_PARTS, RankTimes

TEXT, DATA = "summary.txt", "profile.json"
MAX_COLUMNS = 4  # more ranks are shown by the least, the mean and the most of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator of torch in rank 0's trace.

    Attributes:
        self_s: seconds of a step in it and in no operator that it called; on a GPU of the device.
        calls: of it in a step.
    """

    name: str
    self_s: float
    calls: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Some steps of every rank.

    Attributes:
        folder: of the traces, the page and the JSON file.
        device: "cpu" or "cuda".
        first_step: the first of the `steps` steps that were timed; as many that were traced
            followed.
        ranks: their mean steps. operators: the largest of rank 0.
    """

    folder: str
    device: str
    first_step: int
    steps: int
    ranks: tuple[RankTimes, ...]
    operators: tuple[Operator, ...] = ()

    def text(self) -> str:
        """The page."""
        return "\n".join([*self._head(), *self._steps(), "", *self._largest()])

    def _head(self) -> list[str]:
        count = f"{len(self.ranks)} {self.device} rank{'s' if len(self.ranks) > 1 else ''}"
        last = self.first_step + self.steps - 1
        lines = [
            f"Mean of steps {self.first_step} to {last} on {count}, milliseconds; "
            "nothing traced them."
        ]
        if self.device == "cuda":
            lines.append(
                "The device was waited for at the end of every part, so that nothing "
                "overlaps: such steps take longer."
            )
        heads = ["least", "mean", "most"]
        if len(self.ranks) <= MAX_COLUMNS:
            heads = [f"rank {rank}" for rank in range(len(self.ranks))]
        return [*lines, f"{'part':<10}{'share':>6}" + "".join(f"{head:>9}" for head in heads)]

    def _steps(self) -> list[str]:
        """Rows that add up to the step, and below them those that do not."""
        ranks, lines = self.ranks, []
        for part, what in STEP_PARTS.items():
            # Waiting is taken out of every part and shown once, so that a slow rank does not make
            # all others look slow.
            own = [rank.parts[part].seconds - rank.parts[part].waited for rank in ranks]
            if any(own):
                lines.append(self._row(part, own, what))
        waited = [rank.waited_s for rank in ranks]
        lines.append(self._row("wait", waited, "for other ranks, in all parts; for ids ahead"))
        rest = [rank.rest_s for rank in ranks]
        lines.append(self._row("rest", rest, "between the parts: Python, scores"))
        lines.append(self._row("step", [rank.step_s for rank in ranks], ""))
        for part in STEP_PARTS:
            ahead = [rank.parts[part].ahead for rank in ranks]
            if any(ahead):
                what = "ahead: beside the step before, no part of it"
                lines.append(_line(part, "", ahead, what))
        waits = [rank.waits for rank in ranks]
        faults = [rank.faults for rank in ranks]
        used = [rank.cpu_s / rank.step_s for rank in ranks]
        return [
            *lines,
            _line("waits", "", waits, "times that the step stops to wait", "{:.1f}".format),
            _line("faults", "", faults, "minor page faults a step", "{:.0f}".format),
            _line("CPU", "", used, "of a core, all threads of the rank", "{:.0%}".format),
        ]

    def _largest(self) -> list[str]:
        first = self.first_step + self.steps
        return [
            f"Largest operators of rank 0 in steps {first} to {first + self.steps - 1}, which were "
            "traced and so took longer:",
            f"{'self ms':>9}{'calls':>8}  operator, of a step",
            *(
                f"{format_ms(o.self_s):>9}{o.calls:>8.1f}  {fit(o.name, 80)}"
                for o in self.operators
            ),
        ]

    def _row(self, name: str, seconds: list[float], what: str) -> str:
        share = sum(seconds) / sum(rank.step_s for rank in self.ranks)
        return _line(name, f"{share:.0%}", seconds, what)

    def to_json(self) -> dict[str, Any]:
        """All numbers; seconds of the mean step."""
        operators = [{"name": o.name, "self": o.self_s, "calls": o.calls} for o in self.operators]
        return {
            "device": self.device,
            "first_step": self.first_step,
            "steps": self.steps,
            "ranks": [_rank_json(rank) for rank in self.ranks],
            "operators": operators,
        }

    def write(self) -> None:
        """Write the page and the JSON file.

        Raises:
            OSError: the folder cannot be written to.
        """
        folder = Path(self.folder)
        (folder / TEXT).write_text(self.text() + "\n")
        (folder / DATA).write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _rank_json(rank: RankTimes) -> dict[str, Any]:
    parts = {}
    for name, times in rank.parts.items():
        parts[name] = {**times._asdict(), "share": times.seconds / rank.step_s}
    return {
        "parts": parts,
        "waited": rank.waited_s,
        "rest": rank.rest_s,
        "step": rank.step_s,
        "waits": rank.waits,
        "faults": rank.faults,
        "cpu_share": rank.cpu_s / rank.step_s,
    }


def _line(
    name: str, share: str, values: list[float], what: str, form: Callable[[float], str] = format_ms
) -> str:
    if len(values) > MAX_COLUMNS:
        values = [min(values), sum(values) / len(values), max(values)]
    cells = "".join(f"{form(value):>9}" for value in values)
    return f"{name:<10}{share:>6}{cells}" + f"  {what}".rstrip()


def check_folder(path: str) -> None:
    """Make the folder of a profile, and try to write to it.

    Raises:
        ConfigError: it cannot.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write a profile to {path}: {error}. Name a local folder that every rank can "
            "write to."
        ) from None
