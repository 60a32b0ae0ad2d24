"""How long the windows of a training are: near the wanted time, and none short before an end."""

from __future__ import annotations

import random

import pytest

from rayrec.train.window import MAX_STEPS, even_length, next_length


@pytest.mark.parametrize("seconds_per_step", [1e-4, 0.03, 1.0, 60.0])
def test_windows_settle_near_the_wanted_time(seconds_per_step: float) -> None:
    steps = 1
    for _ in range(20):
        steps = next_length(steps, steps * seconds_per_step, wanted_s=2.0)
        assert 1 <= steps <= 1000
    assert steps == 1 or 1.0 <= steps * seconds_per_step <= 2.0 or steps == 1000


@pytest.mark.seeds(range(50))
def test_no_window_is_much_shorter_than_the_one_before_it_at_an_end(seed: int) -> None:
    """Over any number of steps, with steps that take any time."""
    rng = random.Random(seed)
    left, wanted = rng.randint(1, 10_000), 1
    seconds, windows = 10.0 ** rng.uniform(-4, 1), list[int]()
    while left:
        windows.append(even_length(wanted, left))
        assert 1 <= windows[-1] <= min(left, 1.5 * wanted)
        left -= windows[-1]
        took = windows[-1] * seconds * rng.uniform(0.3, 3)
        wanted = next_length(windows[-1], took, wanted_s=2.0)
        assert wanted <= MAX_STEPS
    assert windows[-1] >= (windows[-2] if len(windows) > 1 else 1) - 1
