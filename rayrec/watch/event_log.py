"""`EventLog`: a run's events as JSON lines in its folder, for its page and for any other reader.

A run that is continued appends to the same log: every life begins with a start line.
`rayrec.watch.schema` has the lines, `rayrec.watch.event_file` says where they go. A window costs
one short write in the driver's process; the ranks do not wait for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from rayrec.checks import lasting_path
from rayrec.errors import CheckpointError, SaveError, TrainingFailed
from rayrec.fields.writing import json_data
from rayrec.storage import one_line
from rayrec.train.callbacks import Callback, RunInfo
from rayrec.version import VERSION
from rayrec.watch.event_callback import EventCallback, outcome_of
from rayrec.watch.event_file import Patient, check_events, open_events
from rayrec.watch.schema import FORMAT

# fields that later versions brought, left out where they say nothing
LATER: dict[str, Any] = {"ids": {}, "pause_s": 0.0, "window": None}


class EventLog(EventCallback):
    """Writes events.jsonl.

    Args:
        path: the run's folder, local or a URI of pyarrow.fs; made when training starts.
    Raises:
        ConfigError: the folder cannot be written to.
        SaveError: it cannot be written to any more when training starts. Later trouble is a warning
            and does not end the run.

    Example:
        RunConfig(..., callbacks=(EventLog("runs/a"),))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = lasting_path("EventLog has path", path)
        check_events(self.path)
        self._file: Patient | None = None
        self._step, self._steps = 0, 0

    def on_start(self, info: RunInfo) -> None:
        """Open the log and write the start of a life."""
        self._step, self._steps = info.first_step, info.steps
        values = {
            "format": FORMAT,
            "rayrec": VERSION,
            "run": info.name,
            "run_path": info.run_path,
            "steps": info.steps,
            "world_size": info.world_size,
            "hosts": info.hosts,
            "plan": json.loads(info.plan.to_json()),
            "settings": info.settings,
            "predicted": [asdict(rank) for rank in info.predicted],
        }
        try:
            file = open_events(self.path)
            file.add(self._line("start", info.first_step, values), True)
        except (OSError, pa.ArrowException, CheckpointError) as error:
            raise SaveError(f"cannot write events to {self.path}: {one_line(error)}.") from None
        self._file = Patient(file, self.path)

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Take note of how far the run is, for the lines of a failure and of the end."""
        self._step = max(self._step, step)

    def event(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a line."""
        # a recovery goes back, and lines of later steps follow once more
        self._step = step if kind == "recovery" else max(self._step, step)
        # what says nothing is left out, so that an older rayrec reads most runs
        values = {n: v for n, v in values.items() if n not in LATER or v != LATER[n]}
        if self._file is not None:
            self._file.add(self._line(kind, step, values), kind != "window")

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        """Write the failure, if there is one, and the end."""
        if self._file is None:
            return
        outcome = "done" if self._step >= self._steps else "stopped"
        if error is not None and outcome_of(error) == "failed":
            outcome = "failed"
            self._file.add(self._line("failure", self._step, _failure(error)), True)
        self._file.add(self._line("end", self._step, {"outcome": outcome}), True)
        self._file.close()
        self._file = None

    @staticmethod
    def _line(event: str, step: int, values: Mapping[str, Any]) -> bytes:
        line = {"event": event, "at": round(time.time(), 3), "step": step, **json_data(values)}
        return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _failure(error: BaseException) -> dict[str, Any]:
    """Who failed and why, without the traceback, which the run's log has."""
    rank, host = None, ""
    if isinstance(error, TrainingFailed):
        rank, host = error.rank, error.host
    return {"cause": f"{type(error).__name__}: {one_line(error)}", "rank": rank, "host": host}


def with_event_log(callbacks: Sequence[Callback], run_path: str | None) -> tuple[Callback, ...]:
    """The callbacks of a run, after the log of its folder unless one of them writes it.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    logs = [callback.path for callback in callbacks if isinstance(callback, EventLog)]
    if run_path is None or run_path in logs:
        return tuple(callbacks)
    return EventLog(run_path), *callbacks
