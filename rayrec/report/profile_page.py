"""What a profile found, as one page of text and as JSON: milliseconds by part and rank, and the
largest operators. No torch here.

A part's own milliseconds exclude waiting for other ranks, which has a row of its own, so that
parts, wait and rest add up to the step. What threads do beside the step before stands below it.
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
            calls: of a step.
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
        ranks, traced = self.ranks, self.first_step + self.steps
        count = f"{len(ranks)} {self.device} rank{'s' if len(ranks) > 1 else ''}"
        lines = [
            f"Mean of steps {self.first_step} to {traced - 1} on {count}, milliseconds; "
            "nothing traced them."
        ]
        if self.device == "cuda":
            lines.append(
                "The device was waited for at the end of every part, so that nothing "
                "overlaps: such steps take longer."
            )
        heads = (
            [f"rank {rank}" for rank in range(len(ranks))]
            if len(ranks) <= MAX_COLUMNS
            else ["least", "mean", "most"]
        )
        lines.append(f"{'part':<10}{'share':>6}" + "".join(f"{head:>9}" for head in heads))
        for part, what in STEP_PARTS.items():
            own = [rank.parts[part].seconds - rank.parts[part].waited for rank in ranks]
            lines += [self._row(part, own, what)] if any(own) else []
        lines.append(
            self._row(
                "wait",
                [rank.waited_s for rank in ranks],
                "for other ranks, in all parts; for ids ahead",
            )
        )
        lines.append(
            self._row("rest", [rank.rest_s for rank in ranks], "between the parts: Python, scores")
        )
        lines.append(self._row("step", [rank.step_s for rank in ranks], ""))
        for part in STEP_PARTS:
            ahead = [rank.parts[part].ahead for rank in ranks]
            lines += (
                [_line(part, "", ahead, "ahead: beside the step before, no part of it")]
                if any(ahead)
                else []
            )
        lines.append(
            _line(
                "waits",
                "",
                [rank.waits for rank in ranks],
                "times that the step stops to wait",
                "{:.1f}".format,
            )
        )
        lines.append(
            _line(
                "faults",
                "",
                [rank.faults for rank in ranks],
                "minor page faults a step",
                "{:.0f}".format,
            )
        )
        used = [rank.cpu_s / rank.step_s for rank in ranks]
        lines.append(_line("CPU", "", used, "of a core, all threads of the rank", "{:.0%}".format))
        lines += [
            "",
            f"Largest operators of rank 0 in steps {traced} to "
            f"{traced + self.steps - 1}, which were traced and so took longer:",
        ]
        lines.append(f"{'self ms':>9}{'calls':>8}  operator, of a step")
        lines += [
            f"{format_ms(o.self_s):>9}{o.calls:>8.1f}  {fit(o.name, 80)}" for o in self.operators
        ]
        return "\n".join(lines)

    def _row(self, name: str, seconds: list[float], what: str) -> str:
        return _line(
            name, f"{sum(seconds) / sum(rank.step_s for rank in self.ranks):.0%}", seconds, what
        )

    def to_json(self) -> dict[str, Any]:
        """All numbers; seconds of the mean step."""
        return {
            "device": self.device,
            "first_step": self.first_step,
            "steps": self.steps,
            "ranks": [
                {
                    "parts": {
                        name: {**times._asdict(), "share": times.seconds / r.step_s}
                        for name, times in r.parts.items()
                    },
                    "waited": r.waited_s,
                    "rest": r.rest_s,
                    "step": r.step_s,
                    "waits": r.waits,
                    "faults": r.faults,
                    "cpu_share": r.cpu_s / r.step_s,
                }
                for r in self.ranks
            ],
            "operators": [
                {"name": o.name, "self": o.self_s, "calls": o.calls} for o in self.operators
            ],
        }

    def write(self) -> None:
        """Write the page and the JSON file.

        Raises:
            OSError: the folder cannot be written to.
        """
        folder = Path(self.folder)
        (folder / TEXT).write_text(self.text() + "\n")
        (folder / DATA).write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _line(
    name: str, share: str, values: list[float], what: str, form: Callable[[float], str] = format_ms
) -> str:
    if len(values) > MAX_COLUMNS:
        values = [min(values), sum(values) / len(values), max(values)]
    return (
        f"{name:<10}{share:>6}"
        + "".join(f"{form(value):>9}" for value in values)
        + f"  {what}".rstrip()
    )


def check_folder(path: str) -> None:
    """Make the folder of a profile, and see that it can be written to.

    Raises:
        ConfigError: it cannot.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write a profile to {path}: {error}. Name a local folder that "
            "every rank can write to."
        ) from None
