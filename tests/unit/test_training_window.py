"""`Window`: what a window of training says of its time."""

from __future__ import annotations

import pytest
import torch

from rayrec.train.window import Window


def test_seconds_that_passed_have_those_before_the_window() -> None:
    """A stream scores a window before it trains on it; what is due by seconds counts both."""
    window = Window(torch.device("cpu"), world_size=1)
    window.before_s = 5.0
    merged = window.merge(lambda: False)
    assert 0 < merged.seconds < 5
    assert merged.passed_s == pytest.approx(5 + merged.seconds)
