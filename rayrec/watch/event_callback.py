"""`EventCallback`: the base of callbacks that hear of a run by events, as events.jsonl has them.

So the log, the trackers and the page of a run speak of the same numbers by the same names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

from rayrec.errors import RunInterrupted
from rayrec.fields.writing import json_data
from rayrec.train.callbacks import Callback
from rayrec.train.events import (
    Evaluation,
    Failure,
    Noticed,
    ProgressReport,
    Recovered,
    Resized,
    Saved,
    StreamProgress,
)


class EventCallback(Callback, ABC):
    """Turns what a run says into events; a subclass takes them, and begins and ends by itself."""

    @abstractmethod
    def event(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Take an event.

        Args:
            kind: one of `rayrec.watch.schema.RECORDS`, without start and end.
            step: global steps done.
            values: the event's fields as JSON data.
        """

    def on_window(self, report: ProgressReport, trainer: Any = None) -> None:
        """Take a window."""
        self._take("window", report)

    def on_evaluation(self, evaluation: Evaluation, trainer: Any = None) -> None:
        """Take an evaluation."""
        self._take("evaluation", evaluation)

    def on_stream(self, progress: StreamProgress, trainer: Any = None) -> None:
        """Take a window of a stream."""
        self._take("stream", progress)

    def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
        """Take a checkpoint."""
        self._take("checkpoint", saved)

    def on_failure(self, failure: Failure) -> None:
        """Take a failure that the run recovers from."""
        self._take("failure", failure)

    def on_recovery(self, recovered: Recovered) -> None:
        """Take a recovery; events of later steps follow once more."""
        self._take("recovery", recovered)

    def on_resize(self, resized: Resized) -> None:
        """Take a new number of ranks."""
        self._take("resize", resized)

    def on_notice(self, noticed: Noticed) -> None:
        """Take a notice that a node will go."""
        self._take("notice", noticed)

    def _take(self, kind: str, told: Any) -> None:
        named = {f.name: getattr(told, f.name) for f in fields(told) if f.name != "step"}
        self.event(kind, told.step, json_data(named))


def outcome_of(error: BaseException | None) -> str:
    """Return how training ended: done, stopped or failed."""
    stopped = isinstance(error, RunInterrupted | KeyboardInterrupt)
    return "stopped" if stopped else "done" if error is None else "failed"
