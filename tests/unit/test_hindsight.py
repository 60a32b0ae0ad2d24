"""Predicted against measured: waits are told apart from work, and a part that is far off names its
constant.
"""

from __future__ import annotations

import pytest

from rayrec.layout.estimates import RankEstimate
from rayrec.layout.rates import PARTS
from rayrec.observe.hindsight import Hindsight
from rayrec.observe.times import STEP_PARTS, PartTimes, RankTimes

MS = 1e-3


def predicted(*ms: float) -> RankEstimate:
    seconds = {f"{part}_s": value * MS for part, value in zip(PARTS, ms, strict=True)}
    return RankEstimate(
        weight_bytes=0, optimizer_bytes=0, buffer_bytes=0, overhead_s=0.1 * MS, **seconds
    )


def measured(ms: list[float], waited: list[float], step_ms: float) -> RankTimes:
    parts = dict.fromkeys(STEP_PARTS, PartTimes())
    parts |= {part: PartTimes(s * MS, w * MS) for part, s, w in zip(PARTS, ms, waited, strict=True)}
    return RankTimes(parts=parts, step_s=step_ms * MS)


def test_a_rank_that_waits_for_another_is_not_slow() -> None:
    """Rank 1 looks up for 2 ms more, so rank 0 waits for its rows for 2 ms more; the transfer of
    0.2 ms is nobody's wait.
    """
    told = (predicted(1, 1, 1, 1, 1), predicted(1, 3, 1, 1, 1))
    took = (
        measured([1, 1, 3, 1, 1], [0, 0, 2.2, 0, 0], 8),
        measured([1, 3, 1, 1, 1], [0, 0, 0.2, 0, 0], 8),
    )
    hindsight = Hindsight(told, took)
    assert [hindsight.worked[0][part] for part in PARTS] == pytest.approx(
        [v * MS for v in (1, 1, 1, 1, 1)]
    )
    assert hindsight.waits == pytest.approx((2 * MS, 0.0))
    assert hindsight.findings() == []
    lines = hindsight.report().splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 102
    assert lines[2].split()[:3] == ["0", "1.000/1.000", "1.000/1.000"] and lines[2].split()[
        -3:
    ] == ["2.000", "1.000", "8.000"]


def test_dense_gradients_that_are_late_are_waited_for_and_not_worked_on() -> None:
    """Rank 1's dense layers take 3 ms more; rank 0 waits for them when gradients are averaged."""
    told = (predicted(1, 1, 1, 1, 1),) * 2
    quick, slow = (measured([1] * 5, [0] * 5, 16) for _ in range(2))
    quick.parts.update({"dense": PartTimes(2 * MS), "backward": PartTimes(7 * MS, 3.5 * MS)})  # type: ignore[attr-defined]
    slow.parts.update({"dense": PartTimes(5 * MS), "backward": PartTimes(4 * MS, 0.5 * MS)})  # type: ignore[attr-defined]
    hindsight = Hindsight(told, (quick, slow))
    assert hindsight.waits == pytest.approx((3 * MS, 0.0))
    lines = hindsight.report().splitlines()
    assert [line.split()[-4:-2] for line in lines[2:]] == [["6.000", "3.000"], ["9.000", "0.000"]]


def test_an_input_that_ran_ahead_is_no_part_of_the_step() -> None:
    times = measured([0.5, 1, 1, 1, 1], [0.5, 0, 0, 0, 0], 5.5)
    times.parts["input"] = PartTimes(0.5 * MS, 0.5 * MS, ahead=5 * MS, ahead_waited=4 * MS)  # type: ignore[index]
    hindsight = Hindsight((predicted(1, 1, 1, 1, 1),) * 2, (times, times))
    assert (
        times.ahead
        and times.rest_s == pytest.approx(MS)
        and hindsight.waits == pytest.approx((0.0, 0.0))
    )
    assert hindsight.worked[0]["input"] == pytest.approx(5 * MS) and hindsight.findings() == []
    assert "no part of a step" in hindsight.report()
    slow = measured([0.5, 2, 2, 2, 2], [0.5, 0, 0, 0, 0], 9)
    slow.parts["input"] = times.parts["input"]  # type: ignore[index]
    told = (predicted(0, 1, 1, 1, 1),) * 3  # by prices that know of it
    (finding,) = [
        f for f in Hindsight(told, (times, times, slow)).findings() if f.startswith("rank")
    ]
    assert "rank 2 took 2.0 times" in finding


def test_a_rank_without_shards_is_not_a_slow_machine() -> None:
    """It is predicted to do nothing; the little that it does is infinitely more than that."""
    idle, busy = measured([0.3, 0.2, 0.3, 0.3, 0.1], [0] * 5, 6), measured([1] * 5, [0] * 5, 6)
    told = (predicted(1, 1, 1, 1, 1), predicted(1, 1, 1, 1, 1), predicted(0, 0, 0, 0, 0))
    assert Hindsight(told, (busy, busy, idle)).findings() == []


@pytest.mark.parametrize("index", range(len(PARTS)))
def test_a_part_that_is_far_off_names_its_constant(index: int) -> None:
    times = [1.0] * len(PARTS)
    times[index] = 4.0
    (finding,) = Hindsight((predicted(1, 1, 1, 1, 1),), (measured(times, [0] * 5, 10),)).findings()
    assert (
        PARTS[index] in finding
        and f"rates.{PARTS[index]}" in finding
        and "4.000 ms instead of 1.000" in finding
    )


def test_a_slow_transfer_names_the_link() -> None:
    ranks = (predicted(1, 1, 1, 1, 1),) * 2
    (finding,) = Hindsight(ranks, (measured([1, 1, 9, 1, 1], [0, 0, 8, 0, 0], 14),) * 2).findings()
    assert "output" in finding and "bandwidth between ranks" in finding


def test_a_slow_machine_is_named() -> None:
    ranks = (predicted(2, 2, 2, 2, 2),) * 3
    normal, slow = measured([2] * 5, [0] * 5, 20), measured([3.3] * 5, [0] * 5, 20)
    findings = Hindsight(ranks, (normal, slow, normal)).findings()
    assert any("rank 1 took 1.7 times" in finding for finding in findings)


def test_many_ranks_make_a_short_report() -> None:
    report = Hindsight(
        (predicted(1, 1, 1, 1, 1),) * 100, (measured([1] * 5, [0] * 5, 6),) * 100
    ).report()
    assert len(report.splitlines()) == 35 and "68 more ranks" in report
