"""The record of every event in events.jsonl, by which a line is read.

Every line is a JSON object with `event`, `at` (seconds of the wall clock since 1970) and `step`
(global steps done). The other fields are those of the dataclass in `RECORDS`. A number that is not
finite is written as null, so that any JSON reader can read the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, Literal, get_args

from rayrec.errors import InputError
from rayrec.fields.json_text import of_json
from rayrec.fields.kinds import field_types
from rayrec.train import events

FORMAT = 1
Number = int | float | None
Outcome = Literal["done", "stopped", "failed"]
OUTCOMES = get_args(Outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineHead:
    """The fields that all lines have."""

    event: str
    at: float
    step: int

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"step is {self.step}; it must be 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LifeStart:
    """A life of a run begins; see docs/watching.md."""

    format: int
    rayrec: str
    run: str
    run_path: str | None
    steps: int
    world_size: int
    hosts: list[str]
    plan: dict[str, Any] | None
    settings: dict[str, Any]
    predicted: list[dict[str, Number]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyFailure:
    """A rank failed, or an error ended the run, for which no rank may be to blame."""

    cause: str
    rank: int | None
    host: str
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LifeEnd:
    """A life of a run is over."""

    outcome: Outcome


RECORDS: dict[str, type] = {
    "start": LifeStart,
    "window": events.ProgressReport,
    "evaluation": events.Evaluation,
    "stream": events.StreamProgress,
    "checkpoint": events.Saved,
    "failure": AnyFailure,
    "recovery": events.Recovered,
    "resize": events.Resized,
    "notice": events.Noticed,
    "end": LifeEnd,
}
# JSON has no number that is not finite and no tuple
_IN_JSON: dict[Any, Any] = {
    float: Number,
    float | None: Number,
    tuple[int, ...]: list[Number],
    tuple[float, ...]: list[Number],
    Mapping[str, float]: dict[str, Number],
    Mapping[str, Mapping[str, int]]: dict[str, dict[str, int]],
}


def read_line(data: Any, where: str) -> tuple[LineHead, dict[str, Any] | None]:
    """Return the event of a line that was read as JSON, and its other fields; `where` is its place.

    Fields that an older version did not write have their defaults. An event of a kind that is not
    known has no fields: a later version may write more kinds.

    Raises:
        InputError: a field is unknown, missing or of another type; names its path.
    """
    shared = field_types(LineHead)
    head, rest = data, dict[str, Any]()
    if isinstance(data, dict):
        head = {name: data[name] for name in shared if name in data}
        rest = {name: value for name, value in data.items() if name not in shared}
    line = of_json(LineHead, head, where, InputError)
    if line.event not in RECORDS:
        return line, None
    written_by = rest.get("format") if line.event == "start" else None
    if isinstance(written_by, int) and written_by > FORMAT:
        raise InputError(
            f"{where} has format {written_by}, of a later rayrec; this one reads {FORMAT}."
        )
    record: Any = of_json(_record(line.event), rest, where, InputError)
    return line, {name: getattr(record, name) for name in names_of(line.event)}


def names_of(event: str) -> list[str]:
    """Return the fields of a known event beside those of `LineHead`."""
    return [each.name for each in fields(_record(event))]


@cache
def _record(event: str) -> type:
    """Return the dataclass of a known event as JSON has it."""
    types, named = field_types(RECORDS[event]), list[Any]()
    for each in fields(RECORDS[event]):
        if each.name != "step":
            kind, options = types[each.name], dict[str, Any](default=each.default)
            if each.default_factory is not MISSING:
                options = {"default_factory": each.default_factory}
            named.append((each.name, _IN_JSON.get(kind, kind), field(**options)))
    return make_dataclass(event, named, kw_only=True)
