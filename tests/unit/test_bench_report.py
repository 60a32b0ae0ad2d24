"""The plots of benchmark results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plots import draw_bars


def test_bars_grow_with_their_ratio_and_point_left_below_one(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    medians = {"a & b": 0.5, "c < d": 1.5, "e": 8.0}
    draw_bars(tmp_path / "bars.png", "title", {case: {"median": m, "p25": m * 0.99, "p75": m * 1.01} for case, m in medians.items()})
    pixels = image.imread(tmp_path / "bars.png")
    blue = (abs(pixels[:, :, :3] - [0x7A / 255, 0x9C / 255, 0xC6 / 255]) < 0.01).all(2)
    rows = [row.nonzero()[0] for row in blue if row.any()]
    spans = sorted({(int(row[0]), int(row[-1])) for row in rows}, key=lambda span: span[1])
    (left, one), (_, near), (start, far) = (min(group) for group in _apart(spans))
    assert left < one < near < far and abs(start - one) < 6
    assert near - one < one - left < far - one  # on a logarithmic axis 1.5 is nearer to 1 than 0.5 is, and 8 the farthest


def _apart(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Spans whose ends are within some pixels are one bar."""
    groups: list[list[tuple[int, int]]] = []
    for span in spans:
        if groups and span[1] - groups[-1][-1][1] < 6:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups
