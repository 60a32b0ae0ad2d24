"""The fields of every event in events.jsonl, and their check.

Every line is a JSON object with `event`, `at` (seconds of the wall clock since 1970) and `step`
(global steps done). The other fields follow from the event. A number that is not finite is written
as null, so that any JSON reader can read the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

FORMAT = 1

# event -> field -> what it holds, a word of _CHECKS
FIELDS: dict[str, dict[str, str]] = {
    "start": {
        "format": "whole number",
        "rayrec": "text",
        "run": "text",
        "run_path": "text or null",
        "steps": "whole number",
        "world_size": "whole number",
        "hosts": "list of texts",
        "plan": "object or null",
        "settings": "object",
        "predicted": "list of objects",
    },
    "window": {
        "rows": "whole number",
        "rows_per_s": "number",
        "loss": "number",
        "auc": "number",
        "ne": "number",
        "data_wait": "list of numbers",
        "scores": "numbers by name",
        "learning_rates": "numbers by name",
        "memory_bytes": "list of numbers",
        "step_s": "numbers by name",
    },
    "evaluation": {
        "scores": "numbers by name",
        "rows": "whole number",
        "seconds": "number",
        "best": "flag",
        "final": "flag",
    },
    "checkpoint": {"path": "text", "seconds": "number", "best": "flag"},
    "failure": {"cause": "text", "rank": "number", "host": "text"},
    "recovery": {
        "path": "text or null",
        "failed_step": "whole number",
        "rank": "number",
        "host": "text",
        "cause": "text",
        "seconds": "number",
        "replaced": "flag",
        "dropped": "flag or absent",
        "in_memory": "flag or absent",
        "spare": "flag or absent",
    },
    "resize": {
        "ranks_before": "whole number",
        "ranks": "whole number",
        "lost": "flag",
        "seconds": "number",
    },
    "notice": {"host": "text", "ranks": "list of numbers", "seconds": "number", "answer": "text"},
    "end": {"outcome": "text"},
}
OUTCOMES = ("done", "stopped", "failed")


def _is_number(value: Any) -> bool:
    # json reads NaN and Infinity, which no event may hold.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (is_number and math.isfinite(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_objects(value: Any) -> bool:
    """Objects of numbers by name."""
    return isinstance(value, list) and all(map(_are_named, value))


_CHECKS = {
    "whole number": _is_whole,
    "number": _is_number,
    "text": lambda value: isinstance(value, str),
    "text or null": lambda value: value is None or isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    # written since runs may change their number of ranks
    "flag or absent": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "object or null": lambda value: value is None or isinstance(value, dict),
    "list of numbers": _are_numbers,
    "numbers by name": _are_named,
    "list of texts": _are_texts,
    "list of objects": _are_objects,
}


def trouble(line: Any) -> str:
    """Return the mistake in a line that was read as JSON, or "".

    Events of a kind that is not known are left to the reader, who passes over them: a later version
    may write more kinds.
    """
    if not isinstance(line, dict):
        return "it is no JSON object"
    for name, kind in {"event": "text", "at": "number", "step": "whole number"}.items():
        if line.get(name) is None or not _CHECKS[kind](line[name]):
            return f"its {name!r} is {line.get(name)!r} and no {kind}"
    for name, kind in FIELDS.get(line["event"], {}).items():
        if name not in line:
            if kind == "flag or absent":
                continue
            return f"the {line['event']} has no {name!r}"
        if not _CHECKS[kind](line[name]):
            return f"{name!r} of the {line['event']} is no {kind}"
    if line["event"] == "start" and line["format"] > FORMAT:
        return f"it has format {line['format']}, of a later rayrec; this one reads {FORMAT}"
    return ""


def plain(value: Any) -> Any:
    """Any value as JSON data: numbers that are not finite are null, what JSON has not is text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **named}
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return plain(value.item())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # The repr of code has its address, which says nothing of the run.
    return getattr(value, "__qualname__", None) or type(value).__qualname__
