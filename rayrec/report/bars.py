"""Stacked bars, one for each rank, as inline SVG. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from rayrec.report.elements import text_at

CHART_WIDTH, CHART_HEIGHT = 1060, 190
LEFT = 64  # of a chart, for its scale
WIDEST = 64  # with its gap; few ranks would be blocks that look like areas
# a limit this many times above the tallest bar would flatten the bars, and is told in words
FAR = 3


def stacks(
    columns: Sequence[Sequence[float]],
    labels: Sequence[str],
    names: Sequence[str],
    show: Callable[[float], str],
    limits: Sequence[float] = (),
    width: int = CHART_WIDTH,
    first: int = 0,
) -> str:
    """Return stacked bars, numbered from `first` on, with a scale and lines at ranks' limits."""
    # Bars must have a scale even where all of them are 0.
    top = max([sum(column) for column in columns] + [0.0]) or 1.0
    near = [limit for limit in limits if limit <= FAR * top]
    # The 5% keep a bar or a line at the top off the edge.
    top = max(top, *near, 0.0) * 1.05
    step = min(WIDEST, (width - LEFT) / len(columns))
    # With thousands of ranks a gap would be wider than the bars.
    gap = min(6.0, step * 0.2) if step > 3 else 0.0
    out = [f'<svg viewBox="0 0 {width} {CHART_HEIGHT + 22}" role="img">']
    for fraction in (0.0, 0.5, 1.0):
        y = CHART_HEIGHT * (1 - fraction)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        below = y + (10 if fraction == 1 else 0)  # the topmost would be cut off above its line
        out.append(text_at(LEFT - 6, below, "end", show(top * fraction)))
    # At most 32 ranks of a wide chart get a number, so that the numbers do not overlap.
    every = max(1, -(-len(columns) * CHART_WIDTH // (32 * width)))
    for rank, column in enumerate(columns):
        x, base = LEFT + rank * step, float(CHART_HEIGHT)
        parts = [f"{name}: {show(value)}" for name, value in zip(names, column, strict=True)]
        title = "\n".join([labels[rank], *parts])
        out.append(f"<g><title>{escape(title)}</title>")
        for part, value in enumerate(column):
            height = value / top * CHART_HEIGHT
            base -= height
            # Less than a twentieth of a pixel is not seen, and only makes the page larger.
            if height > 0.05:
                place = f'x="{x:.2f}" y="{base:.2f}" width="{step - gap:.2f}"'
                out.append(f'<rect class="p{part}" {place} height="{height:.2f}"/>')
        if limits and limits[rank] in near:
            y = CHART_HEIGHT * (1 - limits[rank] / top)
            place = f'x1="{x:.2f}" x2="{x + step - gap:.2f}" y1="{y:.2f}" y2="{y:.2f}"'
            out.append(f'<line class="limit" {place}/>')
        out.append("</g>")
        if rank % every == 0:
            middle = x + (step - gap) / 2
            out.append(text_at(middle, CHART_HEIGHT + 15, "middle", f"{first + rank}"))
    return "".join([*out, "</svg>"])
