"""Reading events.jsonl: the lives of a run joined to one story.

A run that was continued from step 1,000 after it had reached step 1,200 has two accounts of the
steps between; the later life's are true. A run that recovered from a failure has them, too.
`RunEvents.kept` leaves out windows, evaluations and checkpoints that lie behind the step at which a
later life or a recovery began.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import fs

from rayrec.checks import absolute_path
from rayrec.errors import CheckpointError, ConfigError, InputError
from rayrec.storage import one_line, resolve
from rayrec.watch.event_file import NAME, PART
from rayrec.watch.schema import read_line

# events that a later life may take back; a failure happened all the same
TAKEN_BACK = ("window", "evaluation", "checkpoint")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One line.

    Attributes:
        kind: start, window, evaluation, checkpoint, failure, recovery, resize or end.
        at: seconds of the driver's wall clock since 1970.
        step: global steps done.
        life: counts the start lines from 0.
        values: the line's other fields, see `rayrec.watch.schema.RECORDS`.
    """

    kind: str
    at: float
    step: int
    life: int
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvents:
    """All events of a run.

    Attributes:
        path: what was read, as it was named.
        events: in the order in which they were written.
        kept: those that no later life took back.
    """

    path: str
    events: tuple[RunEvent, ...]
    kept: tuple[RunEvent, ...]

    @property
    def start(self) -> RunEvent:
        """The start of the newest life."""
        return [event for event in self.events if event.kind == "start"][-1]

    def of(self, kind: str) -> tuple[RunEvent, ...]:
        """The kept events of a kind, in order."""
        return tuple(event for event in self.kept if event.kind == kind)


def read_events(path: str | os.PathLike[str]) -> RunEvents:
    """Read the events of a run.

    Args:
        path: the run's folder, or one file of events; local or a URI.
    Raises:
        ConfigError: there is no such run, or it has no events.
        InputError: a line is broken; names the file, the line and what is wrong.
    """
    named = os.fspath(path)
    events: list[RunEvent] = []
    kept: list[RunEvent] = []
    life = -1
    for where, data in _lines(named):
        line, values = read_line(data, where)
        kind = line.event
        if kind == "start":
            life += 1
        elif life < 0:
            raise InputError(f"{where} is a {kind}, and a run's events begin with a start.")
        if kind in ("start", "recovery"):
            later = [e for e in kept if e.kind in TAKEN_BACK and e.step > line.step]
            if later:
                gone = set(map(id, later))
                kept = [event for event in kept if id(event) not in gone]
        if values is not None:
            event = RunEvent(kind, line.at, line.step, life, values)
            events.append(event)
            kept.append(event)
    if not events:
        raise ConfigError(f"{named} has no events yet; name a run that has begun to train.")
    return RunEvents(path=named, events=tuple(events), kept=tuple(kept))


def _lines(path: str) -> Iterator[tuple[str, Any]]:
    """Every line as data of JSON, with the place where it stands."""
    cut = ""
    for where, text in _texts(path):
        try:
            line = json.loads(text)
        # data in data without end are no event either
        except (ValueError, RecursionError) as error:
            words = f"{where} is no JSON: {one_line(error)}. Remove the line, or restore the file."
            cut = cut or words
            continue
        # A driver that was killed, or whose disk is full, leaves its last line cut, also where that
        # is its first. After it comes nothing, or another life.
        if cut and not (isinstance(line, dict) and line.get("event") == "start"):
            raise InputError(cut)
        cut = ""
        yield where, line


def _texts(path: str) -> Iterator[tuple[str, bytes]]:
    """Every line that is not empty, and where it stands.

    Raises:
        ConfigError: there is no file of events, or it cannot be read.
    """
    wanted = f"name the folder of a run, which holds {NAME}, or that file"
    try:
        filesystem, root = resolve(absolute_path("a run is", path))
        kind = filesystem.get_file_info(root).type
        if kind == fs.FileType.NotFound:
            raise ConfigError(f"there is no run at {path}; {wanted}.")
        files = [root] if kind == fs.FileType.File else files_of(filesystem, root)
        if not files:
            raise ConfigError(f"{path} holds no events; {wanted}.")
        for file in files:
            with filesystem.open_input_stream(file, compression=None) as stream:
                content = stream.read()
            for number, text in enumerate(content.split(b"\n"), 1):
                if text.strip():
                    yield f"line {number} of {file}", text
    except (OSError, pa.ArrowException, CheckpointError) as error:
        raise ConfigError(
            f"cannot read the events of {path}: {one_line(error)}; {wanted}."
        ) from None


def files_of(filesystem: fs.FileSystem, folder: str) -> list[str]:
    """The files of events of a run's folder, in the order in which they were written."""
    names = [info.base_name for info in filesystem.get_file_info(fs.FileSelector(folder))]
    # Numbers have six digits or more, so a longer name is a later part.
    parts = sorted((n for n in names if PART.fullmatch(n)), key=lambda name: (len(name), name))
    return [f"{folder}/{name}" for name in [*parts, *({NAME} & set(names))]]
