"""What a mistake is, how a command ended, and what is wrong with that end.

The contract of `rayrec.command`: code 2 and one line on standard error after a user's mistake, code
1 and one line after a run that failed, no traceback, no hang, nothing ignored, nothing left behind.
A mistake must also be found before training, unless only the rows that training reads tell of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOUND_S = 60.0  # a command that takes longer counts as one that hangs

Spoil = Callable[[Path, Path], None]  # (the mistake's own folder, the folder of sound files)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        command: the name of the command, as in `sound.COMMANDS`.
        options: what is added to the sound command line, as a shell would read it. `{own}` is the
            mistake's own folder, `{data}` the folder of sound files.
        says: what the last line of standard error must hold; words with `|` between them must all
            be there.
        base: name of the sound command line in `sound.LINES`, or "" for none.
        code: how the command must end.
        spoil: prepares files in the mistake's own folder.
        env: variables for the command.
        late: only a row that training reads tells of the mistake.
        cold: start a new interpreter, also where a warm one would do.
        file_bytes: no file may grow beyond so many bytes, as on a full disk.
        stdout: where standard output goes instead of into a file; "-" closes it.
        may_leave: a pattern of names that may be new in the mistake's own folder.
    """

    command: str
    options: str
    says: str
    base: str
    code: int = 2
    spoil: Spoil | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    late: bool = False
    cold: bool = False
    file_bytes: int | None = None
    stdout: str = ""
    may_leave: str = ""

    @property
    def title(self) -> str:
        """Return the command with what is special about this mistake, for people and for --only."""
        spoilt = getattr(self.spoil, "title", "")
        env = " ".join(f"{name}={value}" for name, value in self.env.items())
        full = f"[files of at most {self.file_bytes} bytes]" if self.file_bytes is not None else ""
        out = f"[standard output: {self.stdout}]" if self.stdout else ""
        words = (env, self.command, f"<{self.base}>", self.options, spoilt, full, out)
        return " ".join(" ".join(words).split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a command ended.

    Attributes:
        code: its exit code, negative for a signal; None when it was ended after the bound.
        stdout, stderr: what it printed.
        seconds: how long it took.
        left: what it left behind, one line each.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    left: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """Return the lines on standard error."""
        return self.stderr.splitlines()

    @property
    def last_line(self) -> str:
        """Return the last line on standard error, or "" when there is none."""
        return self.lines[-1] if self.lines else ""


def faults(mistake: Mistake, ending: Ending) -> list[str]:
    """Return what is wrong with how a command ended, one word each; empty when nothing is.

    The words are: hang, traceback, ignored, code, lines, words, late, left.
    """
    found = []
    if ending.code is None:
        return ["hang"]
    if "Traceback (most recent call last)" in ending.stderr:
        found.append("traceback")
    if ending.code == 0 != mistake.code:
        found.append("ignored")
    elif ending.code != mistake.code:
        found.append("code")
    if mistake.code != 0 and len(ending.lines) != 1 and not {"traceback", "ignored"} & set(found):
        found.append("lines")
    if not found and any(word not in ending.last_line for word in mistake.says.split("|")):
        found.append("words")
    if mistake.code == 2 and not mistake.late and re.search(r"(?m)^step \d+/", ending.stdout):
        found.append("late")
    if ending.left:
        found.append("left")
    return found


def mistakes(
    command: str,
    base: str,
    table: Sequence[tuple[str, str] | tuple[str, str, Spoil | None]],
    **more: Any,
) -> list[Mistake]:
    """Make a mistake of every row of a table.

    Args:
        table: rows of (options, says) or (options, says, spoil).
        more: what all of them have besides.
    """
    found = []
    for options, says, *spoil in table:
        how = spoil[0] if spoil else None
        found.append(
            Mistake(command=command, base=base, options=options, says=says, spoil=how, **more)
        )
    return found
