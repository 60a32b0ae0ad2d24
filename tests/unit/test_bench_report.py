"""The plot that a benchmark writes is well-formed, holds every case, and draws its bar to the right place."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.report import bars


def test_a_plot_shows_every_case_and_its_ratio() -> None:
    quartiles = {"p25": 1.9, "median": 2.0, "p75": 2.1}
    ratios = {"a < b": quartiles, "reference": dict.fromkeys(quartiles, 1.0), "fast": {"p25": 0.2, "median": 0.25, "p75": 0.3}}
    root = ElementTree.fromstring(bars("title & more", ratios))
    texts = [element.text for element in root if element.tag.endswith("text")]
    assert texts[0] == "title & more" and {*ratios, "2.00x", "1.00x", "0.25x"} <= set(texts)
    slow, reference, fast = (element for element in root if element.tag.endswith("rect"))
    one = float(slow.attrib["x"])  # a slower case begins at the line of the reference, a faster one ends there
    assert float(reference.attrib["width"]) == 0 and abs(float(fast.attrib["x"]) + float(fast.attrib["width"]) - one) < 0.11
    assert abs(float(fast.attrib["width"]) - 2 * float(slow.attrib["width"])) < 0.11  # the axis is logarithmic
