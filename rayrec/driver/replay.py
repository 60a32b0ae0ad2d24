"""The log of what a driver saw and decided, and its replay through `decide`.

The first line has the rules of the run, each further line one view of the cluster and the commands
that followed. Nothing but the views decides, so the same commands follow from them again, on any
machine, without a cluster. Of events only those are kept that decide something.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape, glob
from pathlib import Path
from typing import TypeVar

from rayrec.driver.commands import At, Command, Log, ReportStep, Tell
from rayrec.driver.decide import decide
from rayrec.driver.run import Rules, Run
from rayrec.driver.states import name_of
from rayrec.driver.views import View
from rayrec.errors import InputError
from rayrec.fields.reading import read_record
from rayrec.fields.writing import record_of
from rayrec.storage import one_line
from rayrec.train.events import Began

T = TypeVar("T")
PREFIX = "decisions-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A view as a line of the log, and what followed from it.

    Attributes:
        view: the view, with the events that decide something.
        state: state of the run after the decision.
        commands: commands to the cluster, as text.
    """

    view: View
    state: str
    commands: tuple[str, ...]

    @classmethod
    def of(cls, view: View, run: Run, commands: Sequence[Command]) -> Look:
        """Return the line for a view, the run after it, and the commands that followed."""
        began = tuple(event for event in view.events if isinstance(event, Began))
        return cls(
            view=replace(view, events=began),
            state=name_of(run.state),
            commands=told_commands(commands),
        )


def told_commands(commands: Sequence[Command]) -> tuple[str, ...]:
    """Return commands to the cluster as text; those to the user follow from events, too."""
    return tuple(str(c) for c in commands if not isinstance(c, Tell | At | Log | ReportStep))


def line(of: Rules | Look) -> str:
    """Return a line of the log: the first one has the rules."""
    return json.dumps(record_of(of))


@contextmanager
def recording(run_path: str) -> Iterator[Callable[[Rules | Look], None]]:
    """Yield a function that adds a line to a new log in the folder of a run.

    A log that finds no room on the disk ends there, and the run goes on.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = Path(run_path) / "logs" / f"{PREFIX}{stamp}-{os.getpid()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    is_full = False

    def add(of: Rules | Look) -> None:
        nonlocal is_full
        if is_full:
            return
        text = f"{line(of)}\n".encode()
        try:
            is_full = file.write(text) != len(text)
        except OSError:
            is_full = True

    # what waits in a buffer would fail again when the file is closed
    with path.open("wb", buffering=0) as file:
        yield add


def timelines(run_path: str) -> Iterator[str]:
    """Replay the logs of a run, and yield lines for people: when it entered which state."""
    for path in sorted(glob(f"{escape(run_path)}/logs/{PREFIX}*.jsonl")):
        try:
            replay(path)
        except InputError as error:
            # a log of another version hinders no report
            yield str(error)
            continue
        _, looks = read_log(path)
        began, state = None, ""
        yield f"{path}: the same commands follow again"
        for look in looks:
            began = look.view.now if began is None else began
            if look.state != state:
                state = look.state
                yield f"  {look.view.now - began:9.1f} s  {state}"


def read_log(path: str) -> tuple[Rules, Iterator[Look]]:
    """Return the rules of a log, and its looks one by one.

    Raises:
        InputError: names the file and the line that cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines(keepends=True)
    # a driver that was killed may have left half a line
    lines = [text for text in lines if text.endswith("\n")]
    if not lines:
        raise InputError(f"{path} is empty; a log of decisions begins with the rules of its run.")
    return _read(Rules, lines[0], f"{path}, line 1"), (
        _read(Look, text, f"{path}, line {number}") for number, text in enumerate(lines[1:], 2)
    )


def _read(kind: type[T], text: str, where: str) -> T:
    try:
        found: T = read_record(kind, json.loads(text))
    except ValueError as error:
        raise InputError(f"{where}: {one_line(error)}.") from None
    return found


def replay(path: str) -> Run:
    """Decide by every view of a log again, and return the run at its end.

    Raises:
        InputError: other commands follow than those of the log; names the line.
    """
    rules, looks = read_log(path)
    run = Run.of(rules)
    for number, look in enumerate(looks, 2):
        commands = told_commands(decide(run, look.view))
        if commands != look.commands:
            raise InputError(
                f"{path}, line {number}: {list(look.commands)} was decided, and {list(commands)} "
                "follows now; the log is of another version."
            )
    return run
