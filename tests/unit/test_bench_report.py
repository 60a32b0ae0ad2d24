"""The plot that a benchmark writes is a picture, holds every case, and draws its bar to the right
place.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.image import imread

from benchmarks.plots import bars, draw_bars

QUARTILES = {"p25": 1.9, "median": 2.0, "p75": 2.1}
RATIOS = {
    "a < b": QUARTILES,
    "reference": dict.fromkeys(QUARTILES, 1.0),
    "fast": {"p25": 0.2, "median": 0.25, "p75": 0.3},
}


def test_a_plot_shows_every_case_and_its_ratio() -> None:
    (axes,) = bars("title & more", RATIOS).axes
    assert axes.get_title() == "title & more" and [
        label.get_text() for label in axes.get_yticklabels()
    ] == list(RATIOS)
    assert [text.get_text() for text in axes.texts] == ["2x", "1x", "0.25x"]
    assert axes.get_xscale() == "log"
    ends = [sorted((bar.get_x(), bar.get_x() + bar.get_width())) for bar in axes.patches]
    # a slower case begins at the line of the reference, a faster one ends there
    assert ends == [[1.0, 2.0], [1.0, 1.0], [0.25, 1.0]]
    (low, high), (top, bottom) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    assert low < 0.2 and high > 2.1 and top < 0 and bottom > 2  # all is within the picture


def test_a_plot_is_written(tmp_path: Path) -> None:
    draw_bars(tmp_path / "bars.png", "title", RATIOS)
    height, width, _ = imread(tmp_path / "bars.png").shape
    assert width == 1080 and height > 150
