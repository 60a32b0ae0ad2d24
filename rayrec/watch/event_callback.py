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


def _as_event(kind: str) -> Any:
    """Return a method of `EventCallback` that takes what a run says as an event of a kind."""

    def take(self: EventCallback, told: Any, trainer: Any = None) -> None:
        named = {f.name: getattr(told, f.name) for f in fields(told) if f.name != "step"}
        self.event(kind, told.step, json_data(named))

    return take


class EventCallback(Callback, ABC):
    """Turns what a run says into events; a subclass takes them, and begins and ends by itself."""

    on_window = _as_event("window")
    on_evaluation = _as_event("evaluation")
    on_stream = _as_event("stream")
    on_checkpoint = _as_event("checkpoint")
    on_failure = _as_event("failure")
    on_recovery = _as_event("recovery")  # events of later steps follow once more
    on_resize = _as_event("resize")
    on_notice = _as_event("notice")

    @abstractmethod
    def event(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Take an event.

        Args:
            kind: one of `rayrec.watch.schema.RECORDS`, without start and end.
            step: global steps done.
            values: the event's fields as JSON data.
        """


def outcome_of(error: BaseException | None) -> str:
    """Return how training ended: done, stopped or failed."""
    stopped = isinstance(error, RunInterrupted | KeyboardInterrupt)
    return "stopped" if stopped else "done" if error is None else "failed"
