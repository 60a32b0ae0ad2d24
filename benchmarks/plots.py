"""Plots of results, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_bars(path: Path, title: str, ratios: Mapping[str, Mapping[str, float]]) -> None:
    """Write `bars` as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    bars(title, ratios).savefig(path, dpi=120)


def bars(title: str, ratios: Mapping[str, Mapping[str, float]]) -> Figure:
    """One bar per case, from 1 to its median ratio on a logarithmic axis, with a whisker over the
    quartiles.

    Args:
        ratios: case -> "p25", "median" and "p75".
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(9.0, 0.9 + 0.24 * len(ratios)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(ratios))
    medians = [q["median"] for q in ratios.values()]
    axes.set_xscale("log")
    axes.barh(places, [median - 1.0 for median in medians], left=1.0, color="#7a9cc6")
    axes.hlines(
        places,
        [q["p25"] for q in ratios.values()],
        [q["p75"] for q in ratios.values()],
        color="#222233",
        linewidth=1.5,
    )
    axes.axvline(1.0, color="#222233", linewidth=1.0)
    low = min(0.5, *(q["p25"] for q in ratios.values())) * 0.9
    high = max(2.0, *(q["p75"] for q in ratios.values()))
    axes.set_xlim(low, high * (high / low) ** 0.12)
    for place, q in zip(places, ratios.values(), strict=True):
        axes.annotate(
            f"{q['median']:.3g}x",
            (max(1.0, q["p75"]), place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(places, list(ratios), fontsize=8)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(len(ratios) - 0.3, -0.7)
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
