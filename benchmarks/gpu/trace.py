"""What ran beside the step on a GPU, from a trace of torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

Span = tuple[float, float]  # microseconds
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Overlap(NamedTuple):
    """Milliseconds of a traced run.

    Attributes:
        step_ms: kernels of the busiest stream, which is the step's.
        copies_ms: copies from the host on other streams; copies_beside_ms: of these, while the
            step's kernels ran.
        ahead_ms: kernels on other streams; ahead_beside_ms: likewise.
        other_streams: streams beside the step's that did anything.
        kernels: of all streams.
    """

    step_ms: float
    copies_ms: float
    copies_beside_ms: float
    ahead_ms: float
    ahead_beside_ms: float
    other_streams: int
    kernels: int


def overlaps(path: Path) -> Overlap:
    """Read a trace in Chrome's format, as `export_chrome_trace` writes it."""
    events = json.loads(path.read_text())["traceEvents"]
    return overlaps_of([event for event in events if event.get("cat") in _ON_GPU])


def overlaps_of(events: list[dict[str, Any]]) -> Overlap:
    """From events of a GPU: "cat", "name", "ts" and "dur" in microseconds, args["stream"]."""
    by_stream: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        by_stream.setdefault(event["args"].get("stream"), []).append(event)
    if not by_stream:
        return Overlap(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    busy = {stream: sum(e["dur"] for e in found) for stream, found in by_stream.items()}
    main = max(busy, key=lambda stream: busy[stream])
    step = _joined([_span(event) for event in by_stream[main]])
    others = [event for stream, found in by_stream.items() if stream != main for event in found]
    copies = [_span(e) for e in others if e["cat"] == "gpu_memcpy" and "HtoD" in e["name"]]
    ahead = [_span(e) for e in others if e["cat"] == "kernel"]
    return Overlap(
        step_ms=_ms(step),
        copies_ms=_ms(copies),
        copies_beside_ms=_ms_within(copies, step),
        ahead_ms=_ms(ahead),
        ahead_beside_ms=_ms_within(ahead, step),
        other_streams=len(by_stream) - 1,
        kernels=sum(event["cat"] == "kernel" for event in events),
    )


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _joined(spans: list[Span]) -> list[Span]:
    """Spans that touch each other as one, ascending."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _ms(spans: list[Span]) -> float:
    return round(sum(end - start for start, end in spans) * 1e-3, 3)


def _ms_within(spans: list[Span], others: list[Span]) -> float:
    """Of `spans`, the time in which any of the ascending `others` ran."""
    total = 0.0
    for start, end in spans:
        for first, last in others:
            total += max(0.0, min(end, last) - max(start, first))
    return round(total * 1e-3, 3)
