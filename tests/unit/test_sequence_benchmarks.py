"""What benchmarks of sequence models say of their figures."""

from __future__ import annotations

import pytest

from benchmarks.sasrec import mean_step, shares
from benchmarks.sequences import misses
from rayrec.observe.times import STEP_PARTS, PartTimes, RankTimes


def ratio(median: float) -> dict[str, dict[str, float]]:
    return {"ratio": {"median": median}}


def test_a_sentence_names_the_cases_that_miss_the_mark() -> None:
    results = {"din, 32x50, 0.25": ratio(2.9), "din, 32x50, 0.5": ratio(1.2)}
    results |= {"hstu, 64x400, 0.25": ratio(3.0)}
    said = misses(results)
    assert said.startswith("1 of 2 cases miss") and "din 32x50 (2.90)" in said
    assert "hstu" not in said
    assert misses({"hstu, 64x400, 0.25": ratio(3.0)}).startswith("No case misses")


def rank_times(**parts: PartTimes) -> RankTimes:
    return RankTimes(parts={**dict.fromkeys(STEP_PARTS, PartTimes()), **parts}, step_s=0.1)


def test_waits_are_no_part_and_ids_ahead_are_of_the_embedding() -> None:
    first = rank_times(
        input=PartTimes(0.02, 0.01, ahead=0.004, ahead_waited=0.001),
        update=PartTimes(0.001),
        optimizer=PartTimes(0.03),
    )
    second = rank_times(lookup=PartTimes(0.01), optimizer=PartTimes(0.03))
    step = mean_step([first, second])
    assert step["input"] == pytest.approx(5) and step["wait"] == pytest.approx(5)
    # input, look-up and update of half a rank each, and what went ahead
    plain = {**step, "optimizer": 10.0, "step": 70.0}
    found = shares(step, plain)
    assert found["embedding"] == pytest.approx((5 + 5 + 0.5 + 1.5) / 100)
    assert found["update of biases"] == pytest.approx(0.2)
    assert found["all of biases"] == pytest.approx(0.3)
