"""Thinning of a log of events: what goes of the older half of its lines, so that it stays small.

Windows, evaluations and checkpoints of the older half become half as many, at even distances of
steps, so a run of weeks has its whole course, in larger steps than its end. What happened to the
run stays: starts, failures, recoveries, notices, resizes, ends, final evaluations, and what was the
best. What a later life took back goes. The counts of ids of a window that goes are added to the
next, since readers sum them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

THINNED = ("window", "stream", "evaluation", "checkpoint")
# of the ids of a window; its other numbers say how things stand
COUNTED = ("looked_up", "unknown", "admitted", "evicted", "refused")


def thinned(lines: Sequence[bytes]) -> list[bytes]:
    """Return the lines that stay.

    Args:
        lines: each ends with a newline, but for a last one that was cut.
    """
    half = len(lines) // 2
    told = [_read(text) for text in lines]
    taken_back, steps = _taken_back(told), defaultdict[str, list[int]](list)
    for number, line in enumerate(told[:half]):
        if _may_go(line) and number not in taken_back:
            steps[line["event"]].append(line["step"])
    widths = {kind: _width(of_kind) for kind, of_kind in steps.items()}
    kept: list[bytes | None] = []
    newest: dict[str, tuple[int, int]] = {}  # by kind: its place, and in which part of the steps
    for number, (text, line) in enumerate(zip(lines[:half], told, strict=False)):
        if line.get("event") in ("start", "recovery"):
            # rows of a window count from here
            newest.clear()
        if _may_go(line):
            if number in taken_back:
                continue
            kind = line["event"]
            part = line["step"] // widths[kind]
            place, before = newest.get(kind, (0, -1))
            if part == before:
                earlier, kept[place] = _read(kept[place] or b""), None
                text = _with_counts(line, earlier) if earlier.get("ids") else text
            newest[kind] = len(kept), part
        kept.append(text)
    return [*(text for text in kept if text is not None), *lines[half:]]


def _taken_back(told: Sequence[dict[str, Any]]) -> set[int]:
    """Return the numbers of lines of steps behind one that a later life or a recovery begins at."""
    found, first = set(), math.inf
    for number in reversed(range(len(told))):
        line = told[number]
        if line.get("event") in ("start", "recovery"):
            first = min(first, line["step"])
        elif line.get("step", 0) > first:
            found.add(number)
    return found


def _width(steps: Sequence[int]) -> int:
    """Return the steps of a part, so that at most half as many parts as lines have a line.

    It is a power of two: parts of the next thinning are the same, or pairs of them.
    """
    width = 1
    while len({step // width for step in steps}) > max(1, len(steps) // 2):
        width *= 2
    return width


def _may_go(line: dict[str, Any]) -> bool:
    return line.get("event") in THINNED and not (line.get("best") or line.get("final"))


def _read(text: bytes) -> dict[str, Any]:
    """Return a line as data; nothing where it was cut."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _with_counts(line: dict[str, Any], before: dict[str, Any]) -> bytes:
    ids: dict[str, dict[str, int]] = {**line.get("ids", {})}
    for table, counts in before["ids"].items():
        own = ids.get(table, counts | dict.fromkeys(COUNTED, 0))
        ids[table] = own | {name: own.get(name, 0) + counts.get(name, 0) for name in COUNTED}
    return json.dumps(line | {"ids": ids}, separators=(",", ":")).encode() + b"\n"
